"""Wait until a socket is ready, a deadline is over, or another process has failed."""

import socket
import time
from collections.abc import Iterable
from selectors import EVENT_READ, DefaultSelector

_LONGEST_SELECT_S = 24 * 3600.0
"""Systems refuse to wait for much longer in one call."""


class Alarm:
    """Wakes those who wait for a peer when a process has failed; a slot that the watch fails."""

    def __init__(self) -> None:
        self.socket, self._bell = socket.socketpair()
        self._error: BaseException | None = None

    def fail(self, error: BaseException) -> None:
        """Ring for ever."""
        self._error = error
        self._bell.send(b"!")

    def check(self) -> None:
        """Raise what has happened, if something has."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Close the sockets it holds; nobody waits any more."""
        self.socket.close()
        self._bell.close()


def _patience_s(deadline: float | None) -> float:
    left_s = _LONGEST_SELECT_S if deadline is None else deadline - time.monotonic()
    return max(0.0, min(left_s, _LONGEST_SELECT_S))


class Readiness:
    """Waits until one of several sockets can be read, or written."""

    def __init__(
        self, sockets: Iterable[socket.socket], alarm: Alarm, event: int = EVENT_READ
    ) -> None:
        self._selector, self._alarm = DefaultSelector(), alarm
        for one in sockets:
            self._selector.register(one, event)
        self._selector.register(alarm.socket, EVENT_READ)

    def add(self, one: socket.socket) -> None:
        """Wait for one more socket to have something to read."""
        self._selector.register(one, EVENT_READ)

    def drop(self, one: socket.socket) -> None:
        """Wait for it no longer."""
        self._selector.unregister(one)

    def wait(self, deadline: float | None) -> None:
        """Wait until it is ready; `deadline` by `time.monotonic`, in seconds.

        Raises:
            TimeoutError: it is not, by then.
            PeerError: a process has failed.
        """
        while not self._selector.select(_patience_s(deadline)):
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError
        self._alarm.check()

    def close(self) -> None:
        self._selector.close()
