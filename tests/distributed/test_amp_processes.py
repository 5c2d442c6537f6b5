"""Loss scaling is decided by all processes together."""

from pathlib import Path
from typing import Any

import pytest

from tests.distributed import amp_job
from tests.distributed.call import call
from tests.side_by_side import same_bits

LAYOUTS = ((2, 1), (3, 1), (1, 2))
"""(Stages, replicas); the second of three stages has no parameters."""


@pytest.fixture(scope="module", params=LAYOUTS, ids=str)
def by_rank(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return call(amp_job.work, request.param, tmp_path_factory.mktemp("amp"))


def test_gradients_come_back_from_a_power_of_two_to_the_unscaled_bits(by_rank: list[Any]) -> None:
    names: set[str] = set()
    for found in by_rank:
        scaled, unscaled = found["scaled"], found["unscaled"]
        names |= scaled.keys()
        assert scaled.keys() == unscaled.keys()
        assert all(same_bits(scaled[name], unscaled[name]) for name in scaled)
    assert {"0.weight", "0.bias", "2.weight", "2.bias", "loss 1"} <= names


def test_an_inf_on_one_rank_skips_the_step_of_all(by_rank: list[Any]) -> None:
    for rank, all_found in enumerate(by_rank):
        without_parameters = (len(by_rank), rank) == (3, 1)
        for number, found in enumerate(all_found["overflows"]):
            assert found["scales"] == [1024.0, 512.0, 512.0]
            moved: list[Any] = [set()] * 3 if without_parameters else [{True}, {False}, {True}]
            assert found["moved"] == moved
            assert found["state"] == by_rank[0]["overflows"][number]["state"]


def test_scales_that_differ_are_one_error_on_all(tmp_path: Path) -> None:
    errors = call(amp_job.differing_scales, (2, 1), tmp_path, ends_well=False)
    assert len(set(errors)) == 1
    assert "MeshError: rank 0 scales its loss by 1, rank 1 by 2" in errors[0]


def test_what_torchs_scaler_refuses_on_one_rank_ends_all(tmp_path: Path) -> None:
    first, second = call(amp_job.half_gradients_on_one_rank, (2, 1), tmp_path, ends_well=False)
    assert "ValueError: Attempting to unscale FP16 gradients" in first
    assert "PeerError: rank 0 (stage 0) failed: ValueError: Attempting to unscale" in second
    assert "waited for the others to begin the same call" in second
