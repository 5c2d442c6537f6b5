"""Where a process listens, and by what name the others reach it."""

import os
import socket
import struct
import sys
from contextlib import suppress
from ipaddress import ip_address
from typing import Any


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
