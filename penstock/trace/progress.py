"""Report the progress of long work: a line on a terminal, elsewhere a log record."""

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer

AFTER_S = 1.0
"""Seconds after which work is reported."""
EVERY_S = 10.0
"""Seconds between two reports of how far long work has come."""
_LOG = logging.getLogger("penstock")


@contextmanager
def saying(work: str) -> Iterator[None]:
    """Report `work` if the block takes longer than `AFTER_S`."""
    timer = Timer(AFTER_S, say, (work,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


class Count:
    """Counts what long work has done, and reports it every `EVERY_S` seconds."""

    def __init__(self, work: str) -> None:
        self._work, self._done = work, 0
        self._began_s = self._said_s = time.monotonic()

    def add(self) -> None:
        self._done += 1
        now_s = time.monotonic()
        if now_s - self._said_s >= EVERY_S:
            self._said_s = now_s
            say(f"{self._work}: {self._done:,} in {now_s - self._began_s:.0f} s")


def say(work: str) -> None:
    """Write a line to stderr if that is a terminal; log it otherwise."""
    if sys.stderr.isatty():
        sys.stderr.write(f"penstock: {work} ...\n")
        sys.stderr.flush()
    else:
        _LOG.info("%s", work)
