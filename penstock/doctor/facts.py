"""What each process brings along: versions, machine, devices, and what it found by itself."""

import os
import platform
import socket
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter

from .finding import Finding, Severity, warning
from .host import core_numbers, machine_id, memory_bytes, network_id

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

    Processes with the same `machine` share cores, those with the same `network` reach each other
    by 127.0.0.1.  `address` is where gloo lets others connect to this one.
    """

    rank: int
    host: str
    pid: int
    machine: str
    network: str
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
    settings: tuple[Finding, ...] = ()
    others: tuple[Finding, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return what `from_dict` reads, as JSON knows it."""
        found: dict[str, Any] = TypeAdapter(RankFacts).dump_python(self, mode="json")
        return found

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "RankFacts":
        """Read what `to_dict` gave, perhaps in another process."""
        return TypeAdapter(RankFacts).validate_python(data)


def gather_facts(
    rank: int, address: str, settings: list[Finding], others: list[Finding]
) -> RankFacts:
    """Look at this process and its machine."""
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    package = sys.modules[__name__.partition(".")[0]]
    return RankFacts(
        rank=rank,
        host=socket.gethostname(),
        pid=os.getpid(),
        machine=machine_id(),
        network=network_id(),
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
        settings=tuple(settings),
        others=(*others, *_check_gpus(len(gpus)), *_check_packages()),
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
