"""Standard output and error that cannot end a command: lines that cannot be written are dropped.

A closed pipe (`penstock train ... 2>&1 | head`), a closed terminal or a full disk ends the output,
not the command.
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
    """A file whose writes never fail: after the first failure they go to the null device.

    With `is_told`, a line on standard error reports that.
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
            # a closed pipe is no fault: its reader saw enough
            if self._is_told and error.errno != errno.EPIPE and sys.stderr is not None:
                sys.stderr.write(
                    f"penstock: standard output is lost ({error.strerror}): nothing more is "
                    "written to it\n"
                )
                sys.stderr.flush()
            return memoryview(data).nbytes


@contextmanager
def lasting_output() -> Iterator[None]:
    """Let writes to sys.stdout and sys.stderr raise no OSError within the block."""
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
    """Return the stream over a lasting file; one of another kind as it is."""
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
