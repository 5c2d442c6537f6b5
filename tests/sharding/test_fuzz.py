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
SHORT, LONG = range(3), range(3, 40)


def fuzzed(mesh: Mesh, seeds: list[int]) -> list[Any]:
    return [
        (dtype, differences(mesh, case, seeds, dtype))
        for case in CASES
        for dtype in (torch.float64, torch.float32)
    ]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize(
    "seeds", [SHORT, pytest.param(LONG, marks=pytest.mark.slow)], ids=["short", "long"]
)
def test_random_plans_give_what_the_module_gives(
    mesh: tuple[int, ...], seeds: range, tmp_path: Path
) -> None:
    placement = Placement.of(range(1), num_shards=mesh)
    for found in call(fuzzed, placement, tmp_path, seeds=list(seeds), timeout_s=500.0):
        for dtype, (off, cut) in found:
            limit = 1e-12 if dtype == torch.float64 else 1e-6
            assert cut and off
            assert not [each for each in off if not each[-1] <= limit]
