"""Say what is being done while it takes long: a line on a terminal, elsewhere a log record."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer

AFTER_S = 1.0
_LOG = logging.getLogger("penstock")


@contextmanager
def saying(what: str, after_s: float | None = None) -> Iterator[None]:
    """Say `what` is being done, if the block takes longer than so many seconds (`AFTER_S`)."""
    timer = Timer(AFTER_S if after_s is None else after_s, say, (what,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def say(what: str) -> None:
    """Write a line to stderr where that is a terminal; log it elsewhere."""
    if sys.stderr.isatty():
        sys.stderr.write(f"penstock: {what} ...\n")
        sys.stderr.flush()
    else:
        _LOG.info("%s", what)
