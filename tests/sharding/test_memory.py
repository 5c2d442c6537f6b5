"""What a device holds is what a plan says, counted in bytes of storages."""

from pathlib import Path

import pytest

from benchmarks.sharding.memory import PLANS, at_rest, saved
from penstock import Mesh
from penstock.planner.placement import Placement
from tests.distributed.call import call

NUM_SHARDS = 2


def held(mesh: Mesh) -> tuple[tuple[int, int], dict[str, tuple[int, int]]]:
    return at_rest(mesh), saved(mesh)


def test_each_shard_holds_its_share_and_saves_what_its_plan_counts(tmp_path: Path) -> None:
    for (own, whole), by_plan in call(held, Placement.of(range(1), num_shards=2), tmp_path):
        assert own * NUM_SHARDS == whole
        assert by_plan.keys() == set(PLANS)
        for saves, counted in by_plan.values():
            assert saves == pytest.approx(counted, rel=0.1)
