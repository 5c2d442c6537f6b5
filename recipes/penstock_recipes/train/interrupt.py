"""Turn SIGINT, SIGTERM and SIGHUP into a request to stop: finish the step, save, exit.

A second Ctrl-C ends a single process at once.  Several processes must end together, and torchrun
may send a signal twice, so they do not.  A SIGHUP that nohup ignores stays ignored.
"""

import signal
import threading
from types import FrameType
from typing import Any, Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupt:
    """Records SIGINT, SIGTERM and SIGHUP while entered; does nothing outside the main thread."""

    def __init__(self, *, is_one_of_many: bool = False) -> None:
        self.number = 0
        """The number of the signal, received here or in another process; 0 if there was none."""
        self._is_one_of_many = is_one_of_many
        self._before: dict[int, Any] = {}

    @property
    def wanted(self) -> bool:
        """True once the run should stop."""
        return self.number != 0

    @property
    def exit_code(self) -> int:
        """The shell's exit code: 130 after SIGINT, 143 after SIGTERM, 129 after SIGHUP."""
        return 128 + (self.number or signal.SIGINT)

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {
                number: signal.signal(number, self._note)
                for number in _SIGNALS
                if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN
            }
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.number = number
        if number == signal.SIGINT and not self._is_one_of_many:
            signal.signal(number, signal.default_int_handler)
