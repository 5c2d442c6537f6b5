"""Call one function in every process of a mesh; give what it returned on each rank.

    python -m tests.distributed.call MODULE FUNCTION STAGES REPLICAS ARGUMENTS.json FOLDER

`function(mesh, **arguments)` stands at the top of an importable module; arguments are JSON,
results whatever torch.save takes.
"""

import importlib
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch

import penstock
from tests.distributed.launch import run, start


def call(
    function: Callable[..., Any],
    layout: tuple[int, int],
    folder: Path,
    *,
    ends_well: bool = True,
    timeout_s: float = 100.0,
    **arguments: Any,
) -> list[Any]:
    """Call `function` in (stages, replicas) processes; give the results by rank.

    Not `ends_well`: the processes fail on purpose, and have results all the same.
    """
    stages, replicas = layout
    (folder / "arguments.json").write_text(json.dumps(arguments))
    where = [function.__module__, function.__name__, str(stages), str(replicas)]
    told = ["-m", "tests.distributed.call", *where, str(folder / "arguments.json"), str(folder)]
    if ends_well:
        run(stages * replicas, told, timeout_s)
    else:
        start(stages * replicas, told).wait(timeout_s)
    files = [folder / f"{rank}.pt" for rank in range(stages * replicas)]
    return [torch.load(file, weights_only=False) for file in files]


def main() -> None:
    """Do what is asked for."""
    module, name, stages, replicas, arguments, folder = sys.argv[1:7]
    function = getattr(importlib.import_module(module), name)
    torch.set_num_threads(1)
    with penstock.init_mesh(int(stages), int(replicas), timeout_s=60.0, device="cpu") as mesh:
        random.seed(mesh.rank)  # torch's begins with a seed of its own
        numpy.random.seed(mesh.rank)
        found = function(mesh, **json.loads(Path(arguments).read_text()))
        torch.save(found, Path(folder) / f"{mesh.rank}.pt")


if __name__ == "__main__":
    main()
