"""Turn SIGINT, SIGTERM and SIGHUP into a request to stop: finish the step, save, exit.

A second Ctrl-C ends at once, but not where several processes must end together; they are told by
torchrun, which may send a signal twice.  SIGHUP stays ignored where nohup has it ignored.
"""

import signal
import threading
from types import FrameType
from typing import Any, Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupt:
    """While entered, notes SIGINT, SIGTERM and SIGHUP instead of ending; outside the main thread
    it does nothing.
    """

    def __init__(self, *, is_one_of_many: bool = False) -> None:
        self.number = 0
        """The signal that came, here or in another process; 0 if none did."""
        self._is_one_of_many = is_one_of_many
        self._before: dict[int, Any] = {}

    @property
    def wanted(self) -> bool:
        """Whether the run should end."""
        return self.number != 0

    @property
    def exit_code(self) -> int:
        """What a shell says of a process that a signal ended: 130 for Ctrl-C, 143 for SIGTERM, 129
        for SIGHUP.
        """
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
