"""Random legal plans give what the unsplit module gives: outputs, gradients and buffers."""

from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import Mesh
from penstock.planner.placement import Placement
from tests.distributed.call import call
from tests.sharding.cases import CASES
from tests.sharding.fuzz import differences

MESHES = [(2,), (3,), (2, 2)]
SHORT, LONG = range(1), range(1, 3)
NUM_PARTS = 8 * len(MESHES)


def fuzzed_transformers(mesh: Mesh, seeds: list[int]) -> list[Any]:
    from tests.sharding.cases_transformers import CASES as BLOCKS  # slow to import

    # some compute norms in float32, whatever they are given
    return [differences(mesh, case, seeds, torch.float32) for case in BLOCKS]


def fuzzed(mesh: Mesh, seeds: list[int], which: int) -> list[Any]:
    cases = CASES[which::NUM_PARTS] if len(seeds) == len(SHORT) else CASES
    return [
        (dtype, differences(mesh, case, seeds, dtype))
        for case in cases
        for dtype in (torch.float64, torch.float32)
        if dtype == torch.float64 or len(seeds) > len(SHORT)
    ]


def slow(seeds: range, which: int, name: str) -> Any:
    return pytest.param(seeds, which, id=name, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("seeds", "which"),
    [
        pytest.param(SHORT, 0, id="short-0"),
        *(slow(SHORT, which, f"short-{which}") for which in range(1, NUM_PARTS)),
        *(slow(LONG, which, f"long-{which}") for which in range(len(MESHES))),
    ],
)
def test_random_plans_give_what_the_module_gives(seeds: range, which: int, tmp_path: Path) -> None:
    """In short each case on one of the meshes."""
    placement = Placement.of(range(1), num_shards=MESHES[which % len(MESHES)])
    how: dict[str, Any] = {"seeds": list(seeds), "which": which}
    for found in call(fuzzed, placement, tmp_path, **how, timeout_s=500.0):
        for dtype, (off, cut) in found:
            limit = 1e-12 if dtype == torch.float64 else 1e-6
            assert cut and off
            assert not [each for each in off if not each[-1] <= limit]


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_random_plans_of_blocks_of_transformers(mesh: tuple[int, ...], tmp_path: Path) -> None:
    placement = Placement.of(range(1), num_shards=mesh)
    for found in call(
        fuzzed_transformers, placement, tmp_path, seeds=list(range(2)), timeout_s=500.0
    ):
        for off, cut in found:
            assert cut and off
            assert not [each for each in off if not each[-1] <= 1e-6]
