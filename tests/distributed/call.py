"""Call one function in every process of a mesh; give what it returned on each rank.

    python -m tests.distributed.call MODULE FUNCTION LAYOUT ARGUMENTS.json FOLDER

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
from penstock.planner.placement import Placement
from tests.distributed.launch import run, start


def call(
    function: Callable[..., Any],
    layout: tuple[int, int] | Placement,
    folder: Path,
    *,
    ends_well: bool = True,
    timeout_s: float = 100.0,
    **arguments: Any,
) -> list[Any]:
    """Call `function` in (stages, replicas) processes, or those of a placement; give the results
    by rank.

    Not `ends_well`: the processes fail on purpose, and have results all the same.
    """
    placement = (
        layout if isinstance(layout, Placement) else Placement.of(range(layout[0]), layout[1])
    )
    (folder / "arguments.json").write_text(json.dumps(arguments))
    where = [function.__module__, function.__name__]
    where += [json.dumps([placement.ranks, *_more(placement)])]
    told = ["-m", "tests.distributed.call", *where, str(folder / "arguments.json"), str(folder)]
    if ends_well:
        run(placement.num_ranks, told, timeout_s)
    else:
        start(placement.num_ranks, told).wait(timeout_s)
    files = [folder / f"{rank}.pt" for rank in range(placement.num_ranks)]
    return [torch.load(file, weights_only=False) for file in files]


def _more(placement: Placement) -> list[Any]:
    return [placement.shard_shapes, placement.stage_places, placement.idle]


def main() -> None:
    module, name, ranks, arguments, folder = sys.argv[1:6]
    function = getattr(importlib.import_module(module), name)
    torch.set_num_threads(1)
    every, shapes, places, idle = json.loads(ranks)
    meshes = tuple(tuple(map(tuple, of_stage)) for of_stage in every)
    shard_shapes = None if shapes is None else tuple(map(tuple, shapes))
    options: dict[str, Any] = {"shard_shapes": shard_shapes}
    options |= {"stage_places": None if places is None else tuple(places), "idle": tuple(idle)}
    placement = Placement(meshes, ("cpu",) * len(meshes), **options)
    with penstock.init_mesh(placement=placement, timeout_s=60.0, device="cpu") as mesh:
        random.seed(mesh.rank)  # torch's begins with a seed of its own
        numpy.random.seed(mesh.rank)
        found = function(mesh, **json.loads(Path(arguments).read_text()))
        torch.save(found, Path(folder) / f"{mesh.rank}.pt")


if __name__ == "__main__":
    main()
