"""Report the progress of long work: a line on a terminal, elsewhere a log record."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer

AFTER_S = 1.0
"""Seconds after which work is reported."""
_LOG = logging.getLogger("penstock")


@contextmanager
def saying(work: str, after_s: float | None = None) -> Iterator[None]:
    """Report `work` if the block takes longer than `after_s` (None: `AFTER_S`)."""
    timer = Timer(AFTER_S if after_s is None else after_s, say, (work,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def say(work: str) -> None:
    """Write a line to stderr if that is a terminal; log it otherwise."""
    if sys.stderr.isatty():
        sys.stderr.write(f"penstock: {work} ...\n")
        sys.stderr.flush()
    else:
        _LOG.info("%s", work)
