"""Notice within seconds that a process is gone, or its host: an idle connection of each to rank 0.

    rank 1 ───┐            the systems ask each other every second whether the other one is there,
    rank 2 ───┼─── rank 0  and break the connection if it is not; a process that is busy or stopped
    rank 3 ───┘            is still there

A thread that gives a sign of life cannot tell that: it waits for as long as the process holds
Python's lock.  Whoever sees a connection break tells all others by the watch.  A process that ends
well says so before it closes its connections.
"""

import hmac
import os
import secrets
import socket
import struct
import threading
import time
from contextlib import ExitStack, suppress
from functools import cache
from selectors import EVENT_READ, DefaultSelector
from typing import Any, NamedTuple
from weakref import WeakSet

from .addresses import listen, own_host
from .background import WAIT_FAILURES
from .control import Control
from .threads import THREAD_PREFIX

_ASK_AFTER_S, _ASK_EVERY_S, _ASK_TIMES = 1, 1, 5
"""A host is lost when it has not answered for 6 seconds."""
_GOODBYE = b"."
_PATIENCE_S = 5.0
_LOOK_S = 1.0
"""After so long without an answer, look whether a process has failed, and try again."""
_SECRET_BYTES = 16
_HELLO = struct.Struct(f"!{_SECRET_BYTES}sI")
"""What a process says first: the secret that lets it in, and its rank."""
_OPEN: "WeakSet[socket.socket]" = WeakSet()


class Lifelines:
    """The connections of one process to rank 0, or of rank 0 to all others."""

    def __init__(self, world: Control) -> None:
        """Connect, and begin to look; call on every process.

        Raises:
            WaitTimeout: a process does not connect in time.
            PeerError: a process has failed, or is gone.
        """
        background = world.waits.background
        self._watch = background.watch
        try:
            self._lines = _connected(world)
        except WAIT_FAILURES as error:
            raise background.blame(error, "for all to connect to rank 0", None) from error
        self._selector = DefaultSelector()
        self._end, self._bell = socket.socketpair()
        self._selector.register(self._end, EVENT_READ)
        for rank, line in self._lines.items():
            _keep_asking(line)
            self._selector.register(line, EVENT_READ, rank)
        _close_in_children(*self._lines.values(), self._end, self._bell)
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


class _Address(NamedTuple):
    """What a host is called, how others reach it, and there rank 0's port and secret."""

    name: str
    host: str
    port: int
    secret: bytes


class _Failure:
    """What the watch tells of meanwhile."""

    error: BaseException | None = None

    def fail(self, error: BaseException) -> None:
        self.error = error

    def check(self, deadline: float) -> None:
        if self.error is not None:
            raise self.error
        if time.monotonic() > deadline:
            raise TimeoutError


def _connected(world: Control) -> dict[int, socket.socket]:
    """Learn where all are, and connect; return the connections by rank."""
    watch, failure = world.waits.background.watch, _Failure()
    host, interface = own_host()
    mine, listener = _Address(socket.gethostname(), host, 0, b""), None
    if world.rank == 0:
        listener = listen(interface)
        secret = secrets.token_bytes(_SECRET_BYTES)
        mine = mine._replace(port=listener.getsockname()[1], secret=secret)
    told = world.gather(tuple(mine), "for the others' addresses")
    addresses = [_Address(*address) for address in told]
    watch.name_hosts([f"{a.name} ({a.host})" for a in addresses])
    deadline = time.monotonic() + world.waits.background.timeout_s
    watch.wake_on_failure(failure)
    try:
        if listener is None:
            return {0: _reach(addresses[0], world.rank, failure, deadline)}
        with listener:
            return _admit(listener, mine.secret, world.size - 1, failure, deadline)
    finally:
        watch.forget(failure)


def _reach(address: _Address, rank: int, failure: _Failure, deadline: float) -> socket.socket:
    place = (address.host, address.port)
    while True:
        failure.check(deadline)
        try:
            line = socket.create_connection(place, _LOOK_S)
            line.sendall(_HELLO.pack(address.secret, rank))
        except TimeoutError:
            continue
        except OSError as error:
            raise ConnectionError(
                f"no connection to {address.host}:{address.port}, where rank 0 listens: {error}"
            ) from error
        line.settimeout(None)
        return line


def _admit(
    listener: socket.socket, secret: bytes, count: int, failure: _Failure, deadline: float
) -> dict[int, socket.socket]:
    """Wait for so many others; strangers, and who says nothing, keep nobody waiting."""
    lines: dict[int, socket.socket] = {}
    with ExitStack() as strangers, DefaultSelector() as selector:
        selector.register(listener, EVENT_READ)
        while len(lines) < count:
            failure.check(deadline)
            for line in _speaking(selector, listener, strangers):
                _take(line, secret, lines)
    return lines


def _take(line: socket.socket, secret: bytes, lines: dict[int, socket.socket]) -> None:
    """Keep a connection by its rank; turn away a stranger, and a rank that is here already."""
    rank = _rank_of(line, secret)
    if rank is not None and rank not in lines:
        lines[rank] = line.dup()
    line.close()


def _speaking(
    selector: DefaultSelector, listener: socket.socket, strangers: ExitStack
) -> list[socket.socket]:
    """Return those that say something; let in who knocks, until all is closed."""
    found: list[Any] = []
    for key, _ in selector.select(_LOOK_S):
        if key.fileobj is not listener:
            selector.unregister(key.fileobj)
            found.append(key.fileobj)
            continue
        with suppress(BlockingIOError, ConnectionAbortedError):
            selector.register(strangers.enter_context(listener.accept()[0]), EVENT_READ)
    return found


def _rank_of(line: socket.socket, secret: bytes) -> int | None:
    """Return who is there, None for a stranger."""
    line.setblocking(True)
    try:
        said, rank = _HELLO.unpack(line.recv(_HELLO.size))
    except (OSError, struct.error):
        return None
    return rank if hmac.compare_digest(said, secret) else None


def _keep_asking(line: socket.socket) -> None:
    """Let the system ask whether the other host is there, where it can, and as soon as it can."""
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    wanted = {"TCP_KEEPINTVL": _ASK_EVERY_S, "TCP_KEEPCNT": _ASK_TIMES}
    first = "TCP_KEEPIDLE" if hasattr(socket, "TCP_KEEPIDLE") else "TCP_KEEPALIVE"
    for name, value in {first: _ASK_AFTER_S, **wanted}.items():
        if hasattr(socket, name):
            line.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _close_in_children(*lines: socket.socket) -> None:
    """Let forked children close these: one that lives on would keep its parent's line open."""
    _register()
    for line in lines:
        _OPEN.add(line)


@cache
def _register() -> None:
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_close_all)


def _close_all() -> None:
    for line in list(_OPEN):
        line.close()
