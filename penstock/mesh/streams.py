"""The two ends of a stream: bytes in order over one connection.

    sender      what the kernel takes leaves at once, in the calling thread; the rest by a thread
    receiver    reads what the kernel holds, and waits for the rest

So a small message costs one call on either side, and wakes only a receiver that waits for it.
"""

import os
import socket
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from selectors import EVENT_WRITE
from typing import Any

from .background import Slot, Worker
from .readiness import Alarm, Readiness

_PAUSE_S = 200e-6
"""A message that is nearly there is looked for again and again: to sleep takes longer."""
_MOST_PARTS = 256
"""Pieces of memory in one call; systems allow 1024."""


_let_others_run: Callable[[], None] = getattr(os, "sched_yield", lambda: None)


class Inflow:
    """The receiving end; used by one thread at a time."""

    def __init__(self, connection: socket.socket, alarm: Alarm) -> None:
        self._connection = connection
        self._ready = Readiness([connection], alarm)

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
        self._ready = Readiness([connection], alarm, EVENT_WRITE)
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
        """Send what the kernel takes; return the rest."""
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
    """Return what comes after the first `count` bytes."""
    for n, part in enumerate(parts):
        if count < len(part):
            return [memoryview(part)[count:], *parts[n + 1 :]]
        count -= len(part)
    return []
