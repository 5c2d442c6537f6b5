"""Connections of all processes to rank 0: where it listens, and how the others reach it."""

import os
import socket
import struct
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from ipaddress import ip_address
from typing import Any

from .authentication import Entrance
from .children import close_in_children

_PATIENCE_S = 2.0
"""After so long without an answer, look whether a process has failed, and try again."""


def connect(
    address: tuple[str, int], hello: bytes, deadline: float, check: Callable[[], None]
) -> socket.socket:
    """Connect to where rank 0 listens, and say `hello`; `check` raises if a process has failed.

    Raises:
        ConnectionError: it cannot be reached.
    """
    while True:
        patience_s = min(_PATIENCE_S, max(0.1, deadline - time.monotonic()))
        try:
            connection = socket.create_connection(address, patience_s)
            connection.sendall(hello)
            return _set_up(connection)
        except OSError as error:
            check()
            if not isinstance(error, TimeoutError) or time.monotonic() > deadline:
                raise ConnectionError(
                    f"no connection to {address[0]}:{address[1]}, where rank 0 listens: {error}"
                ) from error


def accept(entrance: Entrance, world_size: int, deadline: float) -> dict[int, socket.socket]:
    """Wait until all other ranks have connected to rank 0; return their connections.

    Raises:
        TimeoutError: they have not, by `deadline`.
        PeerError: a process has failed.
    """
    arrived: dict[int, socket.socket] = {}
    while len(arrived) < world_size - 1:
        for rank, connection in entrance.admit(deadline):
            if rank in arrived or not 0 < rank < world_size:  # that one is here already
                connection.close()
            else:
                arrived[rank] = _set_up(connection)
    return arrived


def _set_up(connection: socket.socket) -> socket.socket:
    connection.setblocking(False)
    close_in_children(connection)
    return connection


def listen(interface: str) -> socket.socket:
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


def own_host() -> tuple[str, str]:
    """Find a name by which the others reach this host, and the address to listen at for them.

    The name is the address of the interface that gloo was told to use, else that on the way to
    where all met.  If neither leads anywhere, the place is on this host, and its name is this
    host's: others may know it by an address that does not show here, so that this process listens
    on all, "".
    """
    chosen = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    if chosen:
        with suppress(OSError):  # no such interface, or none with such an address
            return (address_of(chosen),) * 2
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


def address_of(interface: str) -> str:
    """Return the IPv4 address of a network interface, on Linux.

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
