"""Facts of a process: versions, its machine and its devices."""

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
"""Limits of this container, on Linux."""


def package_version() -> str:
    """Return the version of Penstock."""
    version: str = sys.modules[__name__.partition(".")[0]].__version__
    return version


def quota_cores() -> float | None:
    """Return the container's limit of CPU time, in cores; None without one."""
    quota, _, period = _read(_CGROUP / "cpu.max").partition(" ")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else None


def machine_id() -> str:
    """Return an identity that all processes of a machine share, in containers too."""
    return _read(Path("/proc/sys/kernel/random/boot_id")) or socket.gethostname()


def memory_bytes() -> int:
    """Return the memory that this process may use: the machine's, or its container's."""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _read(_CGROUP / "memory.max")
    return min(whole, int(limit)) if limit.isdigit() else whole


def processor_name() -> str:
    """Return the model of the processor; "" if it is unknown."""
    lines = _read(Path("/proc/cpuinfo")).splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "")


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
    """The facts of one process.  Processes with the same `machine` share cores."""

    rank: int
    host: str
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
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    build = "CPU"
    if torch.version.cuda is not None:
        build = f"CUDA {torch.version.cuda}"
    elif torch.version.hip is not None:
        build = f"ROCm {torch.version.hip}"
    return RankFacts(
        rank=rank,
        host=socket.gethostname(),
        machine=machine_id(),
        python=platform.python_version(),
        torch=torch.__version__,
        torch_build=build,
        penstock=package_version(),
        safetensors=version("safetensors"),
        cores=core_numbers(),
        num_threads=torch.get_num_threads(),
        memory_bytes=memory_bytes(),
        gpus=tuple(Gpu(gpu.name, gpu.total_memory) for gpu in gpus),
    )
