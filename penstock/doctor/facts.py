"""What each process brings along: versions, its machine and its devices."""

import os
import platform
import socket
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch

from penstock.planner.shared_cores import core_numbers

_CGROUP = Path("/sys/fs/cgroup")


def quota_cores() -> float | None:
    """Return how many cores' time the container may use; None where nothing limits it."""
    quota, _, period = _read(_CGROUP / "cpu.max").partition(" ")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else None


def machine_id() -> str:
    """Return what processes on one machine have in common, in containers too."""
    return _read(Path("/proc/sys/kernel/random/boot_id")) or socket.gethostname()


def memory_bytes() -> int:
    """Return the memory that this process may use, in bytes: the machine's, or its container's."""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _read(_CGROUP / "memory.max")
    return min(whole, int(limit)) if limit.isdigit() else whole


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU that torch sees."""

    name: str
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """One process: what it runs with, and where.

    Processes with the same `machine` share cores.
    """

    rank: int
    host: str
    pid: int
    machine: str
    python: str
    torch: str
    torch_build: str
    penstock: str
    safetensors: str
    cores: tuple[int, ...]
    num_threads: int
    memory_bytes: int
    gpus: tuple[Gpu, ...]


def gather_facts(rank: int) -> RankFacts:
    """Look at this process and its machine."""
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    package = sys.modules[__name__.partition(".")[0]]
    return RankFacts(
        rank=rank,
        host=socket.gethostname(),
        pid=os.getpid(),
        machine=machine_id(),
        python=platform.python_version(),
        torch=torch.__version__,
        torch_build=_build(),
        penstock=package.__version__,
        safetensors=version("safetensors"),
        cores=core_numbers(),
        num_threads=torch.get_num_threads(),
        memory_bytes=memory_bytes(),
        gpus=tuple(Gpu(gpu.name, gpu.total_memory) for gpu in gpus),
    )


def _build() -> str:
    if torch.version.cuda is not None:
        return f"CUDA {torch.version.cuda}"
    return f"ROCm {torch.version.hip}" if torch.version.hip is not None else "CPU"
