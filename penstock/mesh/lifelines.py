"""Notice within seconds that a process is gone, or its host: an idle connection of each to rank 0.

    rank 1 ───┐            the systems ask each other every second whether the other one is there,
    rank 2 ───┼─── rank 0  and break the connection if it is not; a process that is busy or stopped
    rank 3 ───┘            is still there

Whoever sees a connection break tells all others by the watch.  A process that ends well says so
before it closes its connections.
"""

import socket
import threading
import time
from contextlib import suppress
from selectors import EVENT_READ, DefaultSelector

from .background import WAIT_FAILURES
from .children import close_in_children
from .connections import LIFELINE, Connections
from .process_group import ProcessGroup
from .threads import THREAD_PREFIX

_ASK_AFTER_S, _ASK_EVERY_S, _ASK_TIMES = 1, 1, 5
"""A host is lost when it has not answered for 6 seconds."""
_GOODBYE = b"."
_PATIENCE_S = 5.0


class Lifelines:
    """The connections of one process to rank 0, or of rank 0 to all others."""

    def __init__(self, world: ProcessGroup, connections: Connections) -> None:
        """Connect, and begin to look; call on every process.

        Raises:
            WaitTimeout: a process does not connect in time.
            PeerError: a process has failed, or is gone.
        """
        background = world.background
        self._watch = background.watch
        try:
            self._lines = _connect(world, connections)
        except WAIT_FAILURES as error:
            raise background.blame(error, "for all to connect to rank 0", None) from error
        self._selector = DefaultSelector()
        self._end, self._bell = socket.socketpair()
        self._selector.register(self._end, EVENT_READ)
        for rank, line in self._lines.items():
            _keep_asking(line)
            self._selector.register(line, EVENT_READ, rank)
        for own in (self._end, self._bell):
            close_in_children(own)
        self._thread = threading.Thread(
            target=self._run, name=f"{THREAD_PREFIX}lifelines", daemon=True
        )
        self._thread.start()

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.data is None:
                    return
                self._look(key.data)

    def _look(self, rank: int) -> None:
        """Read what made the connection readable: a goodbye, its end, or an error."""
        line = self._lines[rank]
        here, there = map(self._watch.host, (self._watch.rank, rank))
        why, said = f"it has ended or was killed, on {there}", b""
        try:
            said = line.recv(1)
        except (ConnectionResetError, BrokenPipeError):
            pass
        except OSError as error:
            why = f"{there}, where it ran, does not answer: lost, or cut off from {here} ({error})"
        self._selector.unregister(line)
        if said != _GOODBYE:
            self._watch.lose(rank, why)

    def close(self) -> None:
        """Say goodbye, and end the thread."""
        for line in self._lines.values():
            with suppress(OSError):
                line.send(_GOODBYE)
        with suppress(OSError):
            self._bell.send(_GOODBYE)
        self._thread.join(_PATIENCE_S)
        for own in (*self._lines.values(), self._end, self._bell):
            own.close()
        self._selector.close()


def _connect(world: ProcessGroup, connections: Connections) -> dict[int, socket.socket]:
    if world.rank != 0:
        return {0: connections.connect(0, LIFELINE)}
    deadline = time.monotonic() + world.background.timeout_s
    others = range(1, world.size)
    return {rank: connections.accept(rank, LIFELINE, deadline) for rank in others}


def _keep_asking(line: socket.socket) -> None:
    """Let the system ask whether the other host is there, where it can, and as soon as it can."""
    if line.family == socket.AF_UNIX:
        return  # the other process is on this host
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    wanted = {"TCP_KEEPINTVL": _ASK_EVERY_S, "TCP_KEEPCNT": _ASK_TIMES}
    first = "TCP_KEEPIDLE" if hasattr(socket, "TCP_KEEPIDLE") else "TCP_KEEPALIVE"
    for name, value in {first: _ASK_AFTER_S, **wanted}.items():
        if hasattr(socket, name):
            line.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
