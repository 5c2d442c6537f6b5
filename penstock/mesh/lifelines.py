"""Notice within seconds that a process or its host is gone, by an idle connection to rank 0.

    rank 1 ───┐            TCP keepalive asks every second, in the operating system;
    rank 2 ───┼─── rank 0  a lost host breaks the connection;
    rank 3 ───┘            a busy or stopped process does not

A heartbeat thread cannot tell these apart: it waits while the process holds Python's lock.  A
process that sees a connection break tells all others by the watch.  A process that ends well says
so before it closes its connections.
"""

import hmac
import os
import secrets
import socket
import struct
import sys
import threading
import time
from contextlib import ExitStack, suppress
from functools import cache
from ipaddress import ip_address
from selectors import EVENT_READ, DefaultSelector
from typing import Any, NamedTuple
from weakref import WeakSet

from .background import WAIT_FAILURES
from .control import Control
from .threads import THREAD_PREFIX

_FIRST_PROBE = "TCP_KEEPIDLE" if hasattr(socket, "TCP_KEEPIDLE") else "TCP_KEEPALIVE"
"""The system's name for the seconds before the first keepalive probe."""
_KEEPALIVE = {_FIRST_PROBE: 1, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 5}
"""Socket options, in seconds and times: a host is lost after 6 seconds without an answer."""
_GOODBYE = b"."
"""The only message on a connection: its process ends well."""
_PATIENCE_S = 5.0
"""Seconds to wait for the thread to end."""
_LOOK_S = 1.0
"""Seconds of a wait after which it checks for failures, and tries again."""
_SECRET_BYTES = 16
"""Length of the secret that authenticates a process to rank 0."""
_HELLO = struct.Struct(f"!{_SECRET_BYTES}sI")
"""The first message of a process: the secret and its rank."""
_OPEN: "WeakSet[socket.socket]" = WeakSet()
"""Sockets to close in forked children."""
_REQUEST_ADDRESS = 0x8915
"""Linux' ioctl SIOCGIFADDR: the address of an interface."""


class Lifelines:
    """The connections of one process to rank 0, or of rank 0 to all others."""

    def __init__(self, world: Control) -> None:
        """Connect all processes, together, and watch in a thread; else PeerError, WaitTimeout."""
        background = world.waits.background
        # 1. Connect; let the system probe each connection.
        self._watch = background.watch
        try:
            self._lines = _connected(world)
        except WAIT_FAILURES as error:
            raise background.blame(error, "for all to connect to rank 0", None) from error
        self._selector = DefaultSelector()
        self._end, self._bell = socket.socketpair()
        self._selector.register(self._end, EVENT_READ)
        for rank, line in self._lines.items():
            line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _KEEPALIVE.items():
                if hasattr(socket, option):
                    line.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
            self._selector.register(line, EVENT_READ, rank)
        # A forked child that lives on would keep its parent's connections open.
        _register()
        _OPEN.update((*self._lines.values(), self._end, self._bell))
        # 2. Watch in a thread; `_bell` wakes it for its end.
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
        """Read from a connection that became readable: a goodbye, its end, or an error."""
        line = self._lines[rank]
        here, there = map(self._watch.host, (self._watch.rank, rank))
        why, content = f"it has ended or was killed, on {there}", b""
        try:
            content = line.recv(1)
        except (ConnectionResetError, BrokenPipeError):
            pass
        except OSError as error:
            why = f"{there}, where it ran, does not answer: lost, or cut off from {here} ({error})"
        self._selector.unregister(line)
        if content != _GOODBYE:
            self._watch.lose(rank, why)

    def close(self) -> None:
        """Say goodbye, and end the thread."""
        for line in self._lines.values():
            with suppress(OSError):
                line.send(_GOODBYE)
        with suppress(OSError):
            self._bell.send(_GOODBYE)
        self._thread.join(_PATIENCE_S)
        for line in (*self._lines.values(), self._end, self._bell):
            line.close()
        self._selector.close()


class _Address(NamedTuple):
    """A host's name, its address for the others, and rank 0's port and secret."""

    name: str
    host: str
    port: int
    secret: bytes


class _Failure:
    """A failure that the watch reports during the connection."""

    error: BaseException | None = None

    def fail(self, error: BaseException) -> None:
        self.error = error

    def check(self, deadline: float) -> None:
        if self.error is not None:
            raise self.error
        if time.monotonic() > deadline:
            raise TimeoutError


def _connected(world: Control) -> dict[int, socket.socket]:
    """Exchange addresses, and connect; return the connections by rank."""
    watch, failure = world.waits.background.watch, _Failure()
    # Rank 0 listens before it tells its port.
    host, interface = own_host()
    mine, listener = _Address(socket.gethostname(), host, 0, b""), None
    if world.rank == 0:
        listener = listen(interface)
        secret = secrets.token_bytes(_SECRET_BYTES)
        mine = mine._replace(port=listener.getsockname()[1], secret=secret)
    rows = world.gather(tuple(mine), "for the others' addresses")
    addresses = [_Address(*row) for row in rows]
    watch.hosts = [f"{a.name} ({a.host})" for a in addresses]
    # A process that fails meanwhile ends this wait, through `failure`.
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


@cache
def _register() -> None:
    def close_all() -> None:
        for line in list(_OPEN):
            line.close()

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=close_all)


def _admit(
    listener: socket.socket, secret: bytes, count: int, failure: _Failure, deadline: float
) -> dict[int, socket.socket]:
    """Accept `count` authenticated processes; a silent or unknown connection blocks nobody.

    A connection whose secret is wrong, or whose rank is connected already, is closed.
    """
    lines: dict[int, socket.socket] = {}
    with ExitStack() as accepted, DefaultSelector() as selector:
        selector.register(listener, EVENT_READ)
        while len(lines) < count:
            failure.check(deadline)
            for line in _readable(selector, listener, accepted):
                _take(line, secret, lines)
    return lines


def _readable(
    selector: DefaultSelector, listener: socket.socket, accepted: ExitStack
) -> list[socket.socket]:
    """Return connections with a first message; accept new ones, which `accepted` closes."""
    lines: list[Any] = []
    for key, _ in selector.select(_LOOK_S):
        if key.fileobj is not listener:
            selector.unregister(key.fileobj)
            lines.append(key.fileobj)
            continue
        with suppress(BlockingIOError, ConnectionAbortedError):
            selector.register(accepted.enter_context(listener.accept()[0]), EVENT_READ)
    return lines


def _take(line: socket.socket, secret: bytes, lines: dict[int, socket.socket]) -> None:
    """Authenticate a connection; keep a copy of it by its rank, and close it."""
    line.setblocking(True)
    with line, suppress(OSError, struct.error):
        content, rank = _HELLO.unpack(line.recv(_HELLO.size))
        if hmac.compare_digest(content, secret) and rank not in lines:
            lines[rank] = line.dup()


def listen(interface: str) -> socket.socket:
    """Listen at an interface's address, or at all addresses if it is ""."""
    if interface:
        family = socket.AF_INET6 if ":" in interface else socket.AF_INET
        listener = socket.create_server((interface, 0), family=family)
    elif socket.has_dualstack_ipv6():
        listener = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    else:
        listener = socket.create_server(("", 0))
    listener.setblocking(False)
    return listener


def own_host() -> tuple[str, str]:
    """Return a name by which the others reach this host, and the address to listen at.

    The name is the address of gloo's interface (GLOO_SOCKET_IFNAME), else of the interface on the
    route to MASTER_ADDR.  Without both, MASTER_ADDR is on this host, perhaps under an address that
    no interface shows.  The name is then MASTER_ADDR, and the process listens everywhere ("").
    """
    # 1. The address of the interface that the user named for gloo.
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    if interface:
        with suppress(OSError):  # no such interface, or none with such an address
            return (address_of(interface),) * 2
    # 2. The address from which this host would reach MASTER_ADDR.
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if host is None or port is None:
        host, port = socket.gethostname(), "1"
    routes: list[Any] = []
    with suppress(OSError):
        routes = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    for family, kind, _, _, address in routes:
        with socket.socket(family, kind) as probe:
            try:
                probe.connect(address)  # sends nothing
            except OSError:
                continue
            source: str = probe.getsockname()[0]
            is_loopback = ip_address(source.partition("%")[0]).is_loopback
            if not is_loopback or host in ("localhost", source):
                return source, source
            return host, ""
    return "localhost", ""


def address_of(interface: str) -> str:
    """Return the IPv4 address of a network interface, on Linux; OSError if there is none."""
    if sys.platform != "linux":
        raise OSError
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        answer = fcntl.ioctl(
            probe.fileno(), _REQUEST_ADDRESS, struct.pack("256s", interface.encode())
        )
    return socket.inet_ntoa(answer[20:24])
