"""Which ranks run which stage, along which axis."""

import pytest

from penstock.errors import PlanError
from penstock.planner.placement import REPLICA, SHARD, STAGE, Placement


def test_a_replica_begins_where_the_one_before_ends() -> None:
    placement = Placement.of((0, 1, 2), num_replicas=2)
    first, second = ([placement.rank_of(s, r) for s in range(3)] for r in range(2))
    assert (first, second) == ([0, 1, 2], [3, 4, 5])
    assert (placement.num_stages, placement.num_replicas, placement.num_ranks) == (3, 2, 6)
    assert [placement.replica_of(rank) for rank in range(6)] == [0, 0, 0, 1, 1, 1]
    assert placement.devices == ("cpu",) * 3


def test_peers_along_an_axis_are_found_from_any_of_them() -> None:
    placement = Placement.of((0, 1, 2), num_replicas=2)
    assert {placement.peers(rank, STAGE) for rank in (3, 4, 5)} == {(3, 4, 5)}
    assert {placement.peers(rank, REPLICA) for rank in (1, 4)} == {(1, 4)}
    assert placement.peers(4, SHARD) == (4,)


def test_ranks_may_run_several_stages() -> None:
    placement = Placement.of((0, 1, 0, 1), num_replicas=2)
    assert [placement.stages_of(rank) for rank in range(4)] == [(0, 2), (1, 3)] * 2
    assert placement.places == (0, 1, 0, 1)
    assert (placement.num_places, placement.place_of(3)) == (2, 1)
    assert placement.name_of(3) == "stages 1 and 3 of replica 1"
    assert Placement.of((1, 0)).name_of(0) == "stage 1"


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ((), "at least one stage"),
        ((((0,),), ((1,), (2,))), "as many replicas"),
        ((((0,), ()), ((1,), ())), "as many replicas"),
        ((((-1,),), ((2,),)), "count from 0"),
        ((((0,), (0,)),), "belongs to one replica"),
    ],
)
def test_ranks_that_no_job_could_have_are_refused(ranks: object, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        Placement(ranks, ("cpu",) * len(ranks))  # type: ignore[arg-type]


def test_there_is_one_device_for_each_stage() -> None:
    with pytest.raises(PlanError, match="1 devices for 2 stages"):
        Placement.of((0, 1), devices=["cpu"])
