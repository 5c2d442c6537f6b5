"""Standard output and error that cannot end a command: what cannot be written is dropped.

A closed pipe (`penstock train ... 2>&1 | head`), a terminal that is gone or a full disk ends what
is shown, not what is done.
"""

import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from select import select
from typing import Any, TextIO

_STANDARD_ERROR = 2


class _LastingFile(io.FileIO):
    """A file whose writes never fail: after the first failure all goes to the null device.

    With `is_told`, standard error says so.
    """

    def __init__(self, descriptor: int, *, is_told: bool) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._is_told = is_told

    def write(self, data: Any, /) -> int:
        try:
            while (written := super().write(data)) is None:
                select([], [self], [])  # whoever shares it made it non-blocking, and it is full
            return written
        except OSError as error:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())  # for child processes and libraries in C, too
            os.close(null)
            if self._is_told and error.errno != errno.EPIPE:  # who closes a pipe saw enough
                _say(f"standard output is lost ({error.strerror}): nothing more is written to it")
            return memoryview(data).nbytes


@contextmanager
def lasting_output() -> Iterator[None]:
    """Let nothing that is written to sys.stdout and sys.stderr raise an OSError meanwhile."""
    before = sys.stdout, sys.stderr
    while (spare := os.open(os.devnull, os.O_RDWR)) <= _STANDARD_ERROR:
        pass  # it was closed at the start: else a file of the run would take its place
    os.close(spare)
    sys.stderr = _lasting(sys.stderr, is_told=False)
    sys.stdout = _lasting(sys.stdout, is_told=True)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:  # Python has none where the descriptor was closed at the start
                stream.flush()
        sys.stdout, sys.stderr = before


def _lasting(stream: TextIO, *, is_told: bool) -> TextIO:
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    stream.flush()
    file = io.BufferedWriter(_LastingFile(stream.fileno(), is_told=is_told))
    return io.TextIOWrapper(
        file,
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def _say(what: str) -> None:
    """Write a line to standard error, if there is one."""
    if sys.stderr is not None:
        sys.stderr.write(f"penstock: {what}\n")
        sys.stderr.flush()
