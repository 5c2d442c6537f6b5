"""Sharding an optimizer's state over replicas changes no bit, and halves the state."""

from pathlib import Path
from typing import Any

import pytest

from tests.distributed import zero_job
from tests.distributed.call import call
from tests.side_by_side import same_bits


@pytest.fixture(
    scope="module",
    params=[
        (1, 2),
        pytest.param((2, 2), marks=pytest.mark.slow),
        pytest.param((1, 3), marks=pytest.mark.slow),
    ],
    ids=str,
)
def by_rank(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return call(zero_job.work, request.param, tmp_path_factory.mktemp("zero"))


def by_stage(by_rank: list[Any], name: str) -> list[list[Any]]:
    """Give what the replicas of each stage found."""
    stages = sorted({found["stage"] for found in by_rank})
    return [[found[name] for found in by_rank if found["stage"] == stage] for stage in stages]


def test_the_bits_are_those_of_the_plain_optimizer(by_rank: list[Any]) -> None:
    for found in by_rank:
        for case in found["trained"]:
            ours, plain = case["sharded"], case["plain"]
            assert ours["losses"] == plain["losses"], case["case"]
            assert ours["lr"] == plain["lr"]
            for name, parameter in plain["parameters"].items():
                assert same_bits(ours["parameters"][name], parameter), f"{case['case']}: {name}"


def test_each_parameters_state_lives_on_one_replica(by_rank: list[Any]) -> None:
    for twins in by_stage(by_rank, "trained"):
        for same_case in zip(*twins, strict=True):
            shares = [case["sharded"] for case in same_case]
            plain = same_case[0]["plain"]
            assert [share["is_sharded"] for share in shares] == [True] * len(shares)
            assert not plain["is_sharded"]
            held = [name for share in shares for name in share["own"]]
            assert sorted(held) == sorted(plain["parameters"])
            assert all(share["state"].keys() <= set(share["own"]) for share in shares)
            stated = [item for share in shares for item in share["state"].items()]
            assert sorted(name for name, _ in stated) == sorted(plain["state"])
            for name, state in stated:
                expected = plain["state"][name]
                assert state.keys() == expected.keys()
                assert all(same_bits(state[key], expected[key]) for key in state)


def test_the_state_is_shared_out_evenly(by_rank: list[Any]) -> None:
    for twins in by_stage(by_rank, "trained"):
        for same_case in zip(*twins, strict=True):
            plain = same_case[0]["plain"]["bytes"]
            shares = [sum(case["sharded"]["bytes"]) for case in same_case]
            assert sum(shares) == sum(plain)
            assert max(shares) <= sum(plain) / len(shares) + max(plain, default=0), shares
            case = same_case[0]["case"]
            if len(by_rank) == 2 and "mixed" in case and "Adagrad" not in case:
                assert max(shares) < 0.55 * sum(plain), shares  # it has state for a frozen one


def test_a_state_goes_on_in_shares(by_rank: list[Any]) -> None:
    for found in by_rank:
        plain, from_whole, from_share = found["resumed"]
        assert plain == from_whole == from_share


def test_groups_may_be_several_and_come_later(by_rank: list[Any]) -> None:
    for found in by_rank:
        plain, sharded = found["grown"]
        assert plain == sharded


def test_replicas_that_give_other_parameters_are_one_error(tmp_path: Path) -> None:
    errors = call(zero_job.differing, (1, 2), tmp_path, ends_well=False)
    assert len(set(errors)) == 1
    assert "replica 1 gives it 11" in errors[0]


def test_an_optimizer_that_fails_on_one_replica_is_named_by_the_others(tmp_path: Path) -> None:
    healthy, failed = call(zero_job.failing, (1, 2), tmp_path, ends_well=False)
    assert failed == "RuntimeError: boom"
    assert healthy.startswith("PeerError: rank 1 (stage 0 of replica 1) failed: RuntimeError")
    assert "waited for the parameters that the other replicas step" in healthy
