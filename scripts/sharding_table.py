"""Write the table of what runs in docs/sharding.md: families of models under ready plans.

python -m scripts.sharding_table MESH FAMILY ...    train these in shards, and note what is equal

MESH is a number of shards, or 2x2.  A cell of the table lists the meshes on which a family under
a plan trains as the unsplit model; each run adds to it, or takes away what is not so any more.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import astuple
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory

from penstock.planner.placement import Placement
from tests.distributed.call import call
from tests.sharding.families import FAMILIES, PLANS, Cell, batch_of, ran

PAGE = Path(__file__).parents[1] / "docs" / "sharding.md"
HEAD = "| family | "
NOT_RUN, LIMIT = "", 1e-12
Cells = dict[tuple[str, str], tuple[str, ...]]
"""By family and plan, the meshes on which it was run and is equal."""


def cells_of(family: str, mesh: tuple[int, ...], plans: Iterable[str] = PLANS) -> Iterator[Cell]:
    """Yield a cell for each plan: samples of a micro-batch and padding take turns, so that each
    value meets each family and each plan.
    """
    count = prod(mesh)
    sizes = (count, count * count, count + 1)
    place = list(FAMILIES).index(family)
    inputs = batch_of(family, 2, padded=False)[1]
    may_pad = isinstance(inputs, dict) and "attention_mask" in inputs
    for plan in plans:
        turn = place + PLANS.index(plan)
        yield Cell(family, plan, sizes[turn % 3], may_pad and turn % 2 == 1)


def run(cells: list[Cell], mesh: tuple[int, ...]) -> list[tuple[float, str]]:
    """Run cells in a process for each shard: how far the worst one is off, and what it says."""
    placement = Placement.of(range(1), num_shards=mesh if len(mesh) > 1 else mesh[0])
    which = [list(astuple(cell)) for cell in cells]
    with TemporaryDirectory() as folder:
        found = call(ran, placement, Path(folder), which=which, timeout_s=600.0)
    ranks = zip(*found, strict=True)
    return [max(of_ranks, key=lambda each: (each[0] != each[0], each[0])) for of_ranks in ranks]


def read(page: str) -> Cells:
    """Read the table of a page; plans that are new have empty cells."""
    lines = page.partition(HEAD)[2].partition("\n\n")[0].splitlines()
    plans = [plan.strip() for plan in lines[0].strip("|").split("|")]
    rows = (line.strip("|").split("|") for line in lines[2:])
    found = {
        (name.strip(), plan): tuple(filter(None, (part.strip() for part in text.split(","))))
        for name, *texts in rows
        for plan, text in zip(plans, texts, strict=True)
    }
    return {(f, plan): found.get((f, plan), ()) for f in FAMILIES for plan in PLANS}


def table(cells: Mapping[tuple[str, str], tuple[str, ...]]) -> str:
    """Write the table."""
    lines = [f"{HEAD}{' | '.join(PLANS)} |", "| --- " * (len(PLANS) + 1) + "|"]
    for name in FAMILIES:
        texts = [", ".join(cells.get((name, plan), ())) or NOT_RUN for plan in PLANS]
        lines.append(f"| {name} | {' | '.join(texts)} |")
    return "\n".join(lines) + "\n"


def written(page: str, cells: Mapping[tuple[str, str], tuple[str, ...]]) -> str:
    """Return the page with another table."""
    before, _, rest = page.partition(HEAD)
    return before + table(cells) + "\n" + rest.partition("\n\n")[2]


def noted(cells: Cells, cell: Cell, mesh: str, off: float) -> None:
    """Note that a cell is equal on a mesh, or is not."""
    own = {*cells.get((cell.family, cell.plan), ())} - {mesh}
    if off <= LIMIT:
        own.add(mesh)
    cells[cell.family, cell.plan] = tuple(sorted(own, key=_size))


def _size(mesh: str) -> tuple[int, str]:
    return len(mesh), mesh


def main() -> None:
    """Run what is asked for, and write it down."""
    text, *families = sys.argv[1:]
    mesh = tuple(map(int, text.split("x")))
    for family in families or FAMILIES:
        cells = list(cells_of(family, mesh))
        found = read(PAGE.read_text())
        for cell, (off, said) in zip(cells, run(cells, mesh), strict=True):
            noted(found, cell, text, off)
            print(*astuple(cell), text, off, said, flush=True)
        PAGE.write_text(written(PAGE.read_text(), found))


if __name__ == "__main__":
    main()
