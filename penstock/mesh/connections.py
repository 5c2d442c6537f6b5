"""The connections of a process to others, made when they are first used.

Between hosts a connection is TCP; on one host a local socket, which costs half as much.
"""

import secrets
import socket
import time
from functools import partial
from typing import NamedTuple

from .addresses import has_local_names, listen, listen_locally, own_host
from .authentication import HELLO, SECRET_BYTES, Entrance
from .children import close_in_children
from .process_group import ProcessGroup
from .readiness import Alarm
from .streams import Inflow, Outflow

LIFELINE, EXAMINED = (1 << 32) - 2, (1 << 32) - 1
"""Numbers of connections that are not for training, which counts its own from 0."""
_PATIENCE_S = 2.0
"""After so long without an answer, look whether a process has failed, and try again."""
_LOCAL_BUFFER_BYTES = 1 << 22
"""What a local socket holds before its sender has to wait, if the system allows so much."""


class _Address(NamedTuple):
    """Where a process listens, and the secret that lets others in.

    `name` is what its host is called.  `local` is the name by which processes of the same host
    find it, "" where the system has no such names; nobody answers to it elsewhere.
    """

    name: str
    host: str
    port: int
    local: str
    secret: bytes


class Connections:
    """What connects this process with the others, by their rank and a number."""

    def __init__(self, world: ProcessGroup) -> None:
        """Begin to listen, and learn where the others do; call on every process.

        Raises:
            WaitTimeout: a process does not say where it listens, in time.
            PeerError: a process has failed, or is gone.
        """
        self._rank, self._background = world.rank, world.background
        self._alarm = Alarm()
        self._background.watch.wake_on_failure(self._alarm)
        host, interface = own_host()
        listener, local = listen(interface), listen_locally()
        secret, port = secrets.token_bytes(SECRET_BYTES), listener.getsockname()[1]
        listeners = [one for one in (listener, local) if one is not None]
        for one in listeners:
            close_in_children(one)
        self._entrance = Entrance(listeners, secret, self._alarm)
        name = "" if local is None else local.getsockname().decode()
        mine = _Address(socket.gethostname(), host, port, name, secret)
        told = world.gather(tuple(mine), "for the others' addresses")
        self._addresses = [_Address(*address) for address in told]
        self._background.watch.name_hosts([f"{a.name} ({a.host})" for a in self._addresses])
        self._seen: set[tuple[int, int]] = set()
        self._arrived: dict[tuple[int, int], socket.socket] = {}
        self._inflows: dict[tuple[int, int], Inflow] = {}
        self._outflows: dict[tuple[int, int], Outflow] = {}

    def outflow(self, rank: int, number: int) -> Outflow:
        """Return what sends to `rank` over connection `number`.

        Raises:
            ConnectionError: that process cannot be reached.
            PeerError: a process has failed meanwhile.
        """
        key = (rank, number)
        if key not in self._outflows:
            make_worker = partial(self._background.new_worker, f"sends-{rank}-{number}")
            self._outflows[key] = Outflow(self.connect(*key), self._alarm, make_worker)
        return self._outflows[key]

    def inflow(self, rank: int, number: int, deadline: float | None) -> Inflow:
        """Return what receives from `rank` over connection `number`, waiting until it is open.

        Only one thread may wait here.

        Raises:
            TimeoutError: it is not, by `deadline`.
            PeerError: a process has failed.
        """
        key = (rank, number)
        if key not in self._inflows:
            self._inflows[key] = Inflow(self.accept(*key, deadline), self._alarm)
        return self._inflows[key]

    def connect(self, rank: int, number: int) -> socket.socket:
        """Open connection `number` to `rank`; non-blocking, and closed by the caller.

        Raises:
            ConnectionError: that process cannot be reached.
            PeerError: a process has failed meanwhile.
        """
        address = self._addresses[rank]
        try:
            connection = self._reach(address)
            connection.sendall(HELLO.pack(address.secret, self._rank, number))
        except OSError as error:
            self._alarm.check()
            raise ConnectionError(
                f"no connection to {address.host}:{address.port}, where rank {rank} listens: "
                f"{error}"
            ) from error
        return _set_up(connection)

    def _reach(self, address: _Address) -> socket.socket:
        """Connect by the local name, or by TCP where nobody answers to that."""
        if address.local and has_local_names():
            connection = socket.socket(socket.AF_UNIX)
            try:
                connection.connect(address.local.encode())
            except OSError:
                connection.close()
            else:
                return connection
        deadline = time.monotonic() + self._background.timeout_s
        while True:
            patience_s = min(_PATIENCE_S, max(0.1, deadline - time.monotonic()))
            try:
                return socket.create_connection((address.host, address.port), patience_s)
            except TimeoutError:
                self._alarm.check()
                if time.monotonic() > deadline:
                    raise

    def accept(self, rank: int, number: int, deadline: float | None) -> socket.socket:
        """Wait until `rank` opens connection `number`; it is then the caller's to close.

        Raises:
            TimeoutError: it does not, by `deadline`.
            PeerError: a process has failed.
        """
        while (rank, number) not in self._arrived:
            for key, connection in self._entrance.admit(deadline):
                if key in self._seen:  # that one is here already
                    connection.close()
                else:
                    self._seen.add(key)
                    self._arrived[key] = _set_up(connection)
        return self._arrived.pop((rank, number))

    def close(self) -> None:
        """Close all connections; call when nobody waits for one any more."""
        streams: list[Inflow | Outflow] = [*self._inflows.values(), *self._outflows.values()]
        for stream in (*streams, *self._arrived.values()):
            stream.close()
        self._entrance.close()
        self._background.watch.forget(self._alarm)
        self._alarm.close()


def _set_up(connection: socket.socket) -> socket.socket:
    connection.setblocking(False)
    close_in_children(connection)
    if connection.family == socket.AF_UNIX:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LOCAL_BUFFER_BYTES)
    else:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection
