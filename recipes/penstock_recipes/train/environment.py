"""What a run is made with, process by process, and the name of the job that makes it."""

import json
import os
import platform
import socket
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from penstock import Mesh
from penstock.doctor import gather_facts

_CPU_INFO = Path("/proc/cpuinfo")


def environment_of(mesh: Mesh) -> str:
    """Write what each process runs with, and where, as JSON; all processes call it alike."""
    facts = {**asdict(gather_facts(mesh.rank)), "processor": _processor()}
    everyone = mesh.world.gather(facts, "for what the others run with")
    common: dict[str, Any] = {
        "system": platform.platform(),
        "command": " ".join(["penstock", *sys.argv[1:]]),
        "processes": everyone,
    }
    return json.dumps(common, indent=1) + "\n"


def _processor() -> str:
    """Return the name of the processor; "" where nothing says it."""
    try:
        lines = _CPU_INFO.read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


_NO_NAME = "none"
"""What torchrun calls a job whose --rdzv-id is not given."""


def job_name() -> str | None:
    """Return a name that all attempts of one torchrun job have in common; None without torchrun.

    It is the job's --rdzv-id; without one, torchrun's own process, which outlives its attempts.
    """
    name = os.environ.get("TORCHELASTIC_RUN_ID")
    if name is None or name != _NO_NAME:
        return name
    return f"{socket.gethostname()}:{os.getppid()}:{_start_of(os.getppid())}"


def _start_of(process: int) -> str:
    """Tell when a process began, in clock ticks since the host started; "" if nobody knows."""
    try:
        text = Path(f"/proc/{process}/stat").read_text(encoding="utf-8")
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[19]
