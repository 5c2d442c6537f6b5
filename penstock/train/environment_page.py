"""With what a run was made, as a section of its report."""

import json
from collections.abc import Mapping
from typing import Any

from penstock.trace.page.page import Section, Table, Text
from penstock.trace.units import bytes_text


def environment_section(text: str) -> Section:
    """Write what `environment_of` noted as two tables: versions, and processes.

    Raises:
        ValueError, LookupError, TypeError, AttributeError: it is something else.
    """
    facts = json.loads(text)
    processes = facts["processes"]
    first = processes[0]
    rows = [
        ("penstock", first["penstock"]),
        ("torch", f"{first['torch']} ({first['torch_build']})"),
        ("python", first["python"]),
        ("safetensors", first["safetensors"]),
        ("system", facts["system"]),
    ]
    heads = ("rank", "host", "processor", "cores", "threads", "memory", "GPUs")
    return Section(
        "Environment",
        (
            Text(facts["command"], is_code=True),
            Table(("", "version"), tuple((str(name), str(value)) for name, value in rows)),
            Table(heads, tuple(_row(process) for process in processes)),
        ),
    )


def _row(process: Mapping[str, Any]) -> tuple[str, ...]:
    gpus = [f"{gpu['name']}, {bytes_text(gpu['memory_bytes'])}" for gpu in process["gpus"]]
    return (
        str(process["rank"]),
        str(process["host"]),
        str(process["processor"]) or "-",
        str(len(process["cores"])),
        str(process["num_threads"]),
        bytes_text(process["memory_bytes"]),
        "; ".join(gpus) or "none",
    )
