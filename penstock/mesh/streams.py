"""Streams: bytes from one process to another, in order, each on a TCP connection of its own.

    sender      what the kernel takes leaves at once, in the calling thread; the rest by a thread
    receiver    reads what the kernel holds, and waits for the rest

So a small message costs one call on either side, and wakes only a receiver that waits for it.
"""

import hmac
import os
import secrets
import socket
import struct
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from ipaddress import ip_address
from selectors import EVENT_READ, EVENT_WRITE, DefaultSelector
from typing import Any

import torch.distributed as dist

from .background import Background, Slot, Worker

_SECRET_BYTES = 16
_HELLO = struct.Struct(f"!{_SECRET_BYTES}sII")
_HELLO_S = 5.0
"""Whoever connects and does not say in time where from is turned away."""
_MOST_PARTS = 256
"""Pieces of memory in one call; systems allow 1024."""


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


class _Readiness:
    """Waits until a socket can be read or written."""

    def __init__(self, on: socket.socket, event: int, alarm: Alarm) -> None:
        self._selector, self._alarm = DefaultSelector(), alarm
        self._selector.register(on, event)
        self._selector.register(alarm.socket, EVENT_READ)

    def wait(self, deadline: float | None) -> None:
        """Wait until it is ready; `deadline` by `time.monotonic`, in seconds.

        Raises:
            TimeoutError: it is not, by then.
            PeerError: a process has failed.
        """
        timeout_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        if not self._selector.select(timeout_s):
            raise TimeoutError
        self._alarm.check()

    def close(self) -> None:
        self._selector.close()


class Inflow:
    """The receiving end; used by one thread at a time."""

    def __init__(self, connection: socket.socket, alarm: Alarm) -> None:
        self._connection = connection
        self._ready = _Readiness(connection, EVENT_READ, alarm)

    def read(self, room: "memoryview[int]", deadline: float | None) -> None:
        """Fill `room`, waiting as long as it takes, or until `deadline`.

        Raises:
            TimeoutError: the bytes did not come in time.
            ConnectionError: it broke.
            PeerError: a process has failed.
        """
        while room:
            try:
                count = self._connection.recv_into(room)
            except BlockingIOError:
                self._ready.wait(deadline)
                continue
            except OSError as error:
                raise ConnectionError(str(error)) from error
            if count == 0:
                raise ConnectionError("connection closed by peer")
            room = room[count:]

    def close(self) -> None:
        self._ready.close()
        self._connection.close()


class Outflow:
    """The sending end; used by one thread."""

    def __init__(
        self, connection: socket.socket, alarm: Alarm, make_worker: Callable[[], Worker]
    ) -> None:
        self._connection = connection
        self._ready = _Readiness(connection, EVENT_WRITE, alarm)
        self._make_worker = make_worker
        self._worker: Worker | None = None
        self._waiting: deque[None] = deque()

    def write(self, parts: "list[memoryview[int]]", then: Callable[[], Any]) -> Slot | None:
        """Send `parts`, none of them empty.

        Returns:
            None if all has left; else where the outcome appears of sending the rest from a thread,
            which keeps the memory and calls `then` at the end.

        Raises:
            ConnectionError: it broke.
        """
        rest = parts if self._waiting else self._push(parts)
        if not rest:
            return None
        if self._worker is None:
            self._worker = self._make_worker()
        self._waiting.append(None)
        return self._worker.submit(partial(self._finish, rest, then))

    def _push(self, parts: "list[memoryview[int]]") -> "list[memoryview[int]]":
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

    def _finish(self, rest: "list[memoryview[int]]", then: Callable[[], Any]) -> None:
        while rest:
            self._ready.wait(None)
            rest = self._push(rest)
        self._waiting.popleft()
        then()

    def close(self) -> None:
        self._ready.close()
        self._connection.close()


def _behind(parts: "list[memoryview[int]]", count: int) -> "list[memoryview[int]]":
    """Give what comes after the first `count` bytes."""
    for n, part in enumerate(parts):
        if count < len(part):
            return [part[count:], *parts[n + 1 :]]
        count -= len(part)
    return []


@dataclass(frozen=True, slots=True)
class _Address:
    """Where a process listens, and the word that lets others in."""

    host: str
    port: int
    secret: bytes


class Streams:
    """The connections of one process, made when they are first used."""

    def __init__(self, rank: int, background: Background) -> None:
        """Begin to listen, and learn where the others do; call on every process."""
        self._rank, self._background = rank, background
        self._alarm = Alarm()
        background.watch.wake_on_failure(self._alarm)
        self._listener = _listen()
        self._knock = _Readiness(self._listener, EVENT_READ, self._alarm)
        self._mine = _Address(
            _own_host(), self._listener.getsockname()[1], secrets.token_bytes(_SECRET_BYTES)
        )
        self._everyone: list[Any] = [None] * dist.get_world_size()
        background.run(
            lambda: dist.all_gather_object(self._everyone, self._mine),
            "for the others' addresses",
        )
        self._inflows: dict[tuple[int, int], Inflow] = {}
        self._outflows: dict[tuple[int, int], Outflow] = {}

    def outflow(self, rank: int, channel: int) -> Outflow:
        """Give the stream number `channel` to `rank`.

        Raises:
            ConnectionError: that process cannot be reached.
        """
        key = (rank, channel)
        if key not in self._outflows:
            name = f"sends-{rank}-{channel}"
            make_worker = partial(self._background.new_worker, name)
            self._outflows[key] = Outflow(self._connect(*key), self._alarm, make_worker)
        return self._outflows[key]

    def inflow(self, rank: int, channel: int, deadline: float | None) -> Inflow:
        """Give the stream number `channel` from `rank`, waiting until that process opens it.

        Only one thread may wait here.

        Raises:
            TimeoutError: it does not, by `deadline`.
            PeerError: a process has failed.
        """
        while (rank, channel) not in self._inflows:
            self._accept(deadline)
        return self._inflows[rank, channel]

    def _connect(self, rank: int, channel: int) -> socket.socket:
        address: _Address = self._everyone[rank]
        try:
            connection = socket.create_connection(
                (address.host, address.port), self._background.timeout_s
            )
            connection.sendall(_HELLO.pack(address.secret, self._rank, channel))
        except OSError as error:
            raise ConnectionError(
                f"no connection to {address.host}:{address.port}, where rank {rank} listens: "
                f"{error}"
            ) from error
        return _set_up(connection)

    def _accept(self, deadline: float | None) -> None:
        """Let the next one in that knows the word."""
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            self._knock.wait(deadline)
            return
        secret, rank, channel = _HELLO.unpack(_hello(connection))
        if hmac.compare_digest(secret, self._mine.secret):
            self._inflows[rank, channel] = Inflow(_set_up(connection), self._alarm)
        else:
            connection.close()

    def close(self) -> None:
        """Close all connections; call when nobody waits for one any more."""
        streams: list[Inflow | Outflow] = [*self._inflows.values(), *self._outflows.values()]
        for stream in streams:
            stream.close()
        self._knock.close()
        self._listener.close()
        self._alarm.close()


def _hello(connection: socket.socket) -> bytes:
    """Give what the other side says first; only zeros if it says too little."""
    said = b""
    try:
        connection.settimeout(_HELLO_S)
        while len(said) < _HELLO.size and (more := connection.recv(_HELLO.size - len(said))):
            said += more
    except OSError:
        pass
    return said if len(said) == _HELLO.size else bytes(_HELLO.size)


def _set_up(connection: socket.socket) -> socket.socket:
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _listen() -> socket.socket:
    """Listen on all addresses, as the store where the processes met does."""
    if socket.has_dualstack_ipv6():
        listener = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    else:
        listener = socket.create_server(("", 0))
    listener.setblocking(False)
    return listener


def _own_host() -> str:
    """Find a name by which the others reach this host: its address on the way to where all met.

    If that leads nowhere, the place is on this host, and its name is this host's.
    """
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if host is None or port is None:
        host, port = socket.gethostname(), "1"
    for family, kind, _, _, address in _addresses(host, port):
        with socket.socket(family, kind) as probe:
            try:
                probe.connect(address)  # sends nothing
            except OSError:
                continue
            own: str = probe.getsockname()[0]
            return host if ip_address(own.partition("%")[0]).is_loopback else own
    return "localhost"


def _addresses(host: str, port: str) -> "list[tuple[Any, ...]]":
    try:
        return list(socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM))
    except OSError:
        return []
