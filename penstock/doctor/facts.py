"""What each process brings along: versions, its machine, devices, and what it found itself."""

import os
import platform
import socket
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter

from penstock.mesh.addresses import address_of

from .finding import Finding, Severity, warning

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


_OPTIONAL = {"sklearn": "scikit-learn", "matplotlib": "matplotlib"}
_NVIDIA = Path("/proc/driver/nvidia/gpus")


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU that torch sees."""

    name: str
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """One process: what it runs with, and where.

    Processes with the same `machine` share cores.  `address` is where gloo lets others connect to
    this one.
    """

    rank: int
    host: str
    pid: int
    machine: str
    address: str
    python: str
    torch: str
    torch_build: str
    penstock: str
    safetensors: str
    cores: tuple[int, ...]
    num_threads: int
    memory_bytes: int
    gpus: tuple[Gpu, ...]
    findings: tuple[Finding, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return what `from_dict` reads, as JSON knows it."""
        found: dict[str, Any] = TypeAdapter(RankFacts).dump_python(self, mode="json")
        return found

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "RankFacts":
        """Read what `to_dict` gave, perhaps in another process."""
        return TypeAdapter(RankFacts).validate_python(data)


def gather_facts(rank: int, address: str, findings: Iterable[Finding] = ()) -> RankFacts:
    """Look at this process and its machine; `findings` are those that it has already."""
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    package = sys.modules[__name__.partition(".")[0]]
    return RankFacts(
        rank=rank,
        host=socket.gethostname(),
        pid=os.getpid(),
        machine=machine_id(),
        address=address,
        python=platform.python_version(),
        torch=torch.__version__,
        torch_build=_build(),
        penstock=package.__version__,
        safetensors=_version_of("safetensors"),
        cores=core_numbers(),
        num_threads=torch.get_num_threads(),
        memory_bytes=memory_bytes(),
        gpus=tuple(Gpu(gpu.name, gpu.total_memory) for gpu in gpus),
        findings=(*findings, *_check_gpus(len(gpus)), *_check_packages()),
    )


def _build() -> str:
    if torch.version.cuda is not None:
        return f"CUDA {torch.version.cuda}"
    return f"ROCm {torch.version.hip}" if torch.version.hip is not None else "CPU"


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _check_gpus(num_seen: int) -> list[Finding]:
    if num_seen or not _NVIDIA.is_dir() or os.environ.get("CUDA_VISIBLE_DEVICES") is not None:
        return []
    reason = (
        f"torch {torch.__version__} is built for {_build()}"
        if torch.version.cuda is None
        else f"torch is built for CUDA {torch.version.cuda}, which the driver may not know"
    )
    return [
        warning(
            "this machine has NVIDIA GPUs that torch does not see",
            f"{reason}, so everything runs on the CPU",
            "Install a build of torch that fits the driver, if the GPUs are wanted",
        )
    ]


def _check_packages() -> list[Finding]:
    absent = [name for module, name in _OPTIONAL.items() if find_spec(module) is None]
    if not absent:
        return []
    return [
        Finding(
            severity=Severity.INFO,
            what=f"{' and '.join(absent)} not installed",
            why="the recipe of the digits and the pictures of timelines need them, nothing else",
            change="pip install 'penstock[demo]', if these are wanted",
        )
    ]
