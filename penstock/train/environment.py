"""With what a run is made: versions, machines and processes, kept for its report."""

import json
import platform
import sys
from pathlib import Path
from typing import Any

from penstock.doctor.facts import gather_facts
from penstock.mesh import Mesh

_CPU_INFO = Path("/proc/cpuinfo")


def environment_of(mesh: Mesh) -> str:
    """Write what each process runs with, and where, as JSON; all processes call it alike."""
    facts = {**gather_facts(mesh.rank, "", [], []).to_dict(), "processor": _processor()}
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
