"""Record the environment of each process of a run, and the name of its torchrun job."""

import json
import os
import platform
import socket
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from penstock import Mesh
from penstock.doctor import gather_facts, processor_name


def environment_of(mesh: Mesh) -> str:
    """Return versions, host and devices of each process as JSON; all processes call it."""
    processor = processor_name() or platform.processor()
    facts = {**asdict(gather_facts(mesh.rank)), "processor": processor}
    environment: dict[str, Any] = {
        "system": platform.platform(),
        "command": " ".join(["penstock", *sys.argv[1:]]),
        "processes": mesh.world.gather(facts, "for what the others run with"),
    }
    return json.dumps(environment, indent=1) + "\n"


_NO_NAME = "none"
"""The name that torchrun gives to a job without --rdzv-id."""


def job_name() -> str | None:
    """Return a name that all attempts of one torchrun job share; None without torchrun.

    The name is the job's --rdzv-id.  Without one it is torchrun's own process, which outlives the
    attempts.
    """
    name = os.environ.get("TORCHELASTIC_RUN_ID")
    if name is None or name != _NO_NAME:
        return name
    return f"{socket.gethostname()}:{os.getppid()}:{_start_of(os.getppid())}"


def _start_of(process: int) -> str:
    """Return the start of a process, in clock ticks since the host started; "" if unknown."""
    try:
        text = Path(f"/proc/{process}/stat").read_text(encoding="utf-8")
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[19]
