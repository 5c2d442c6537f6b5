"""Ctrl-C as a wish: the loop finishes its step, saves and ends; a second Ctrl-C ends at once."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Self


class Interrupt:
    """While entered, notes SIGINT instead of raising; outside the main thread it does nothing."""

    def __init__(self) -> None:
        self.wanted = False
        """Whether Ctrl-C was pressed."""
        self._before: object = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)  # type: ignore[arg-type] # what signal() gave
            self._before = None

    def raise_if_wanted(self) -> None:
        """Raise KeyboardInterrupt if Ctrl-C was pressed; for when there is nothing to save yet."""
        if self.wanted:
            raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.wanted = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
