"""What this machine says of itself: names, addresses, ports, cores and memory."""

import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from penstock.mesh.addresses import address_of

_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A machine, as far as settings must fit to it.

    `interfaces` are the network interfaces with their IPv4 addresses, None where there is none.
    `resolve` gives the addresses of a name in the order in which they are tried, `is_own` tells
    whether an address is one of this machine's, `can_listen` whether a port is free on it.
    """

    name: str
    num_cores: int
    quota_cores: float | None
    interfaces: Mapping[str, str | None]
    resolve: Callable[[str], tuple[str, ...]]
    is_own: Callable[[str], bool]
    can_listen: Callable[[int], bool]


def this_host() -> Host:
    """Describe the machine that this process runs on."""
    return Host(
        name=socket.gethostname(),
        num_cores=len(core_numbers()),
        quota_cores=_quota_cores(),
        interfaces={name: _address_of(name) for _, name in socket.if_nameindex()},
        resolve=_resolve,
        is_own=_is_own,
        can_listen=_can_listen,
    )


def core_numbers() -> tuple[int, ...]:
    """Return the numbers of the cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def machine_id() -> str:
    """Return what processes on one machine have in common, in containers too."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else socket.gethostname()


def network_id() -> str:
    """Return what processes that reach each other by 127.0.0.1 have in common."""
    path = Path("/proc/self/ns/net")
    inode = path.stat().st_ino if path.exists() else 0
    return f"{machine_id()}/{inode}"


def memory_bytes() -> int:
    """Return the memory that this process may use, in bytes: the machine's, or its container's."""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _read(_CGROUP / "memory.max")
    return min(whole, int(limit)) if limit.isdigit() else whole


def is_loopback(address: str) -> bool:
    """Tell whether only processes of the same machine reach `address`."""
    return address.startswith("127.") or address == "::1"


def _quota_cores() -> float | None:
    """Return how many cores' time the container may use; None where nothing limits it."""
    quota, _, period = _read(_CGROUP / "cpu.max").partition(" ")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else None


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _address_of(interface: str) -> str | None:
    try:
        return address_of(interface)
    except OSError:
        return None


def _resolve(name: str) -> tuple[str, ...]:
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return ()
    return tuple(dict.fromkeys(str(address[0]) for *_, address in found))


def _is_own(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def _can_listen(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
            probe.listen()
        except OSError:
            return False
    return True
