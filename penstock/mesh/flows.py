"""The two ends of a stream: bytes in order over one connection.

    sender      what the kernel takes leaves at once, in the calling thread; the rest by a thread
    receiver    reads what the kernel holds, and waits for the rest

So a small message costs one call on either side, and wakes only a receiver that waits for it.
"""

import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from selectors import EVENT_READ, EVENT_WRITE, DefaultSelector
from typing import Any

from .background import Slot, Worker

_PAUSE_S = 200e-6
"""A message that is nearly there is looked for again and again: to sleep takes longer."""
_LONGEST_SELECT_S = 24 * 3600.0
"""Systems refuse to wait for much longer in one call."""
_MOST_PARTS = 256
"""Pieces of memory in one call; systems allow 1024."""


_let_others_run: Callable[[], None] = getattr(os, "sched_yield", lambda: None)


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
        """Give back what it holds; nobody waits any more."""
        self.socket.close()
        self._bell.close()


def _patience_s(deadline: float | None) -> float:
    left_s = _LONGEST_SELECT_S if deadline is None else deadline - time.monotonic()
    return max(0.0, min(left_s, _LONGEST_SELECT_S))


class Readiness:
    """Waits until a socket, or one of several, can be read or written."""

    def __init__(self, sockets: Iterable[socket.socket], event: int, alarm: Alarm) -> None:
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


class Inflow:
    """The receiving end; used by one thread at a time."""

    def __init__(self, connection: socket.socket, alarm: Alarm) -> None:
        self._connection = connection
        self._ready = Readiness([connection], EVENT_READ, alarm)

    def read(self, room: Any, deadline: float | None) -> None:
        """Fill `room`, a piece of memory, waiting as long as it takes, or until `deadline`.

        Raises:
            TimeoutError: the bytes did not come in time.
            ConnectionError: it broke.
            PeerError: a process has failed.
        """
        paused: float | None = None
        while True:
            try:
                count = self._connection.recv_into(room)
            except BlockingIOError:
                paused = self._pause(paused, deadline)
                continue
            except OSError as error:
                raise ConnectionError(str(error)) from error
            if count == len(room):
                return
            if count == 0:
                raise ConnectionError("connection closed by peer")
            room = memoryview(room)[count:]

    def _pause(self, since: float | None, deadline: float | None) -> float:
        """Let others run; after a while, sleep until there is something to read."""
        now = time.monotonic()
        if since is None or now - since < _PAUSE_S:
            _let_others_run()
            return now if since is None else since
        self._ready.wait(deadline)
        return since

    def close(self) -> None:
        self._ready.close()
        self._connection.close()


class Outflow:
    """The sending end; used by one thread."""

    def __init__(
        self, connection: socket.socket, alarm: Alarm, make_worker: Callable[[], Worker]
    ) -> None:
        self._connection = connection
        self._ready = Readiness([connection], EVENT_WRITE, alarm)
        self._make_worker = make_worker
        self._worker: Worker | None = None
        self._waiting: deque[None] = deque()

    def write(self, parts: list[Any]) -> list[Any]:
        """Send what the kernel takes of `parts`, pieces of memory of which none is empty.

        Returns:
            The rest, for `write_later`.

        Raises:
            ConnectionError: it broke.
        """
        return parts if self._waiting else self._push(parts)

    def write_later(self, rest: list[Any], then: Callable[[], Any]) -> Slot:
        """Send the rest from a thread, which keeps the memory and calls `then` at the end.

        Returns:
            Where the outcome appears.
        """
        if self._worker is None:
            self._worker = self._make_worker()
        self._waiting.append(None)
        return self._worker.submit(partial(self._finish, rest, then))

    def _push(self, parts: list[Any]) -> list[Any]:
        """Send what the kernel takes; give the rest."""
        while parts:
            try:
                count = self._connection.sendmsg(parts[:_MOST_PARTS])
            except BlockingIOError:
                break
            except OSError as error:
                raise ConnectionError(str(error)) from error
            parts = _behind(parts, count)
        return parts

    def _finish(self, rest: list[Any], then: Callable[[], Any]) -> None:
        while rest:
            self._ready.wait(None)
            rest = self._push(rest)
        self._waiting.popleft()
        then()

    def close(self) -> None:
        self._ready.close()
        self._connection.close()


def _behind(parts: list[Any], count: int) -> list[Any]:
    """Give what comes after the first `count` bytes."""
    for n, part in enumerate(parts):
        if count < len(part):
            return [memoryview(part)[count:], *parts[n + 1 :]]
        count -= len(part)
    return []
