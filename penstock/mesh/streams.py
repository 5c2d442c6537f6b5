"""Streams: the connections over which stages send each other values, made when first used.

Between hosts a connection is TCP; on one host a local socket, which costs half as much.
"""

import os
import secrets
import socket
import struct
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from ipaddress import ip_address
from typing import Any

from .children import close_in_children
from .flows import Alarm, Inflow, Outflow
from .guests import HELLO, SECRET_BYTES, Guests
from .plain_data import Codec, record
from .process_group import ProcessGroup

_PATIENCE_S = 2.0
"""After so long without an answer, look whether a process has failed, and try again."""
_LOCAL_BUFFER_BYTES = 1 << 22
"""What a local socket holds before its sender has to wait, if the system allows so much."""


@dataclass(frozen=True, slots=True)
class _Address:
    """Where a process listens, and the word that lets others in.

    `name` is what its host is called.  `local` is the name by which processes of the same host
    find it, where the system has such names; nobody answers to it elsewhere.
    """

    name: str
    host: str
    port: int
    local: str | None
    secret: bytes


class Streams:
    """The connections of one process, made when they are first used."""

    def __init__(self, world: ProcessGroup) -> None:
        """Begin to listen, and learn where the others do; call on every process."""
        background = world.background
        self._rank, self._background = world.rank, background
        self._alarm = Alarm()
        background.watch.wake_on_failure(self._alarm)
        host, interface = _own_host()
        listener, local = _listen(interface), _listen_locally()
        listeners = [listener] if local is None else [listener, local]
        self._mine = _Address(
            socket.gethostname(),
            host,
            listener.getsockname()[1],
            None if local is None else local.getsockname().decode(),
            secrets.token_bytes(SECRET_BYTES),
        )
        self._guests = Guests(listeners, self._mine.secret, self._alarm)
        self._everyone: list[_Address] = world.gather(
            self._mine, "for the others' addresses", Codec([record(_Address)])
        )
        background.watch.name_hosts([f"{a.name} ({a.host})" for a in self._everyone])
        self._seen: set[tuple[int, int]] = set()
        self._arrived: dict[tuple[int, int], socket.socket] = {}
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
            self._outflows[key] = Outflow(self.connect(*key), self._alarm, make_worker)
        return self._outflows[key]

    def inflow(self, rank: int, channel: int, deadline: float | None) -> Inflow:
        """Give the stream number `channel` from `rank`, waiting until that process opens it.

        Only one thread may wait here.

        Raises:
            TimeoutError: it does not, by `deadline`.
            PeerError: a process has failed.
        """
        key = (rank, channel)
        if key not in self._inflows:
            self._inflows[key] = Inflow(self.accept(*key, deadline), self._alarm)
        return self._inflows[key]

    def connect(self, rank: int, channel: int) -> socket.socket:
        """Open connection number `channel` to `rank`; non-blocking, and closed by the caller.

        Raises:
            ConnectionError: that process cannot be reached.
            PeerError: a process has failed meanwhile.
        """
        address = self._everyone[rank]
        try:
            connection = self._reach(address)
            connection.sendall(HELLO.pack(address.secret, self._rank, channel))
        except OSError as error:
            raise ConnectionError(
                f"no connection to {address.host}:{address.port}, where rank {rank} listens: "
                f"{error}"
            ) from error
        return _set_up(connection)

    def _reach(self, address: _Address) -> socket.socket:
        """Connect by the local name, or by TCP where nobody answers to that."""
        if address.local is not None and _has_local_names():
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

    def accept(self, rank: int, channel: int, deadline: float | None) -> socket.socket:
        """Wait until `rank` opens connection number `channel`; it is then the caller's to close.

        Raises:
            TimeoutError: it does not, by `deadline`.
            PeerError: a process has failed.
        """
        while (rank, channel) not in self._arrived:
            for key, connection in self._guests.admit(deadline):
                if key in self._seen:  # that one is here already
                    connection.close()
                else:
                    self._seen.add(key)
                    self._arrived[key] = _set_up(connection)
        return self._arrived.pop((rank, channel))

    def close(self) -> None:
        """Close all connections; call when nobody waits for one any more."""
        streams: list[Inflow | Outflow] = [*self._inflows.values(), *self._outflows.values()]
        for stream in (*streams, *self._arrived.values()):
            stream.close()
        self._guests.close()
        self._alarm.close()


def _set_up(connection: socket.socket) -> socket.socket:
    connection.setblocking(False)
    close_in_children(connection)
    if connection.family == socket.AF_UNIX:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LOCAL_BUFFER_BYTES)
    else:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _has_local_names() -> bool:
    return sys.platform == "linux"  # sockets named in a space of their own, not by a file


def _listen_locally() -> socket.socket | None:
    """Listen under a name that only this host knows, if there are such names."""
    if not _has_local_names():
        return None
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"\0penstock-{secrets.token_hex()}")
    listener.listen()
    listener.setblocking(False)
    return listener


def _listen(interface: str) -> socket.socket:
    """Listen at the address of an interface; on all of them where it is "" """
    if interface:
        family = socket.AF_INET6 if ":" in interface else socket.AF_INET
        listener = socket.create_server((interface, 0), family=family)
    elif socket.has_dualstack_ipv6():
        listener = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    else:
        listener = socket.create_server(("", 0))
    listener.setblocking(False)
    return listener


def _own_host() -> tuple[str, str]:
    """Find a name by which the others reach this host, and the address to listen at for them.

    The name is the address of the interface that gloo was told to use, else that on the way to
    where all met.  If neither leads anywhere, the place is on this host, and its name is this
    host's: others may know it by an address that does not show here, so that this process listens
    on all, "".
    """
    chosen = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    if chosen:
        with suppress(OSError):  # no such interface, or none with such an address
            return (_address_of(chosen),) * 2
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
            if not ip_address(own.partition("%")[0]).is_loopback or host in ("localhost", own):
                return own, own
            return host, ""
    return "localhost", ""


def _address_of(interface: str) -> str:
    """Give the IPv4 address of a network interface, on Linux.

    Raises:
        OSError: there is none.
    """
    if sys.platform != "linux":
        raise OSError
    import fcntl

    ask_address = 0x8915  # SIOCGIFADDR
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        found = fcntl.ioctl(probe.fileno(), ask_address, struct.pack("256s", interface.encode()))
    return socket.inet_ntoa(found[20:24])


def _addresses(host: str, port: str) -> "list[tuple[Any, ...]]":
    try:
        return list(socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM))
    except OSError:
        return []
