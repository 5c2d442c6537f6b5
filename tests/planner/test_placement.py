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
        ((((0,), ()), ((1,), ())), r"replicas of stage 0 .* \[1, 0\] shards"),
        ((((0, 1), (2,)),), r"replicas of stage 0 .* \[2, 1\] shards"),
        ((((0, 1),), ((1, 2),)), "one shard of the stages"),
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


def test_ranks_that_share_a_stage_follow_one_another() -> None:
    placement = Placement.of((0, 1), num_replicas=2, num_shards=2)
    assert placement.ranks == (((0, 1), (4, 5)), ((2, 3), (6, 7)))
    assert (placement.places, placement.num_places, placement.num_ranks) == ((0, 1), 2, 8)
    assert placement.peers(5, SHARD) == (4, 5)
    assert placement.peers(5, REPLICA) == (1, 5)
    assert placement.peers(5, STAGE) == (5, 7)
    assert placement.name_of(5) == "stage 0 of replica 1, shard 1"
    for axis, number in ((STAGE, 4), (REPLICA, 4), (SHARD, 4)):
        groups = placement.groups(axis)
        assert len(groups) == number
        assert sorted(rank for group in groups for rank in group) == list(range(8))


def test_a_rank_that_no_stage_is_on_counts() -> None:
    placement = Placement.of((0, 0, 2))
    assert (placement.places, placement.num_places, placement.num_ranks) == ((0, 0, 2), 3, 3)
    assert placement.names == ["stages 0 and 1", "no stage", "stage 2"]


def test_the_first_stage_may_be_on_the_last_ranks() -> None:
    placement = Placement((((2,),), ((0, 1),)), ("cpu",) * 2, stage_places=(0, 1))
    assert (placement.places, placement.meshes) == ((0, 1), placement.ranks)
    assert [placement.place_of(rank) for rank in range(3)] == [1, 1, 0]
    assert placement.peers(0, STAGE) == (0, 1, 2)
    twice = placement.spread((0, 1, 0, 1), ("cpu",) * 4)
    assert twice.ranks == placement.ranks * 2 and twice.places == (0, 1, 0, 1)
    swapped = Placement((((1,),), ((0,),)), ("cpu",) * 2, stage_places=(0, 1))
    assert (swapped.places, swapped.meshes) == ((0, 1), (((1,),), ((0,),)))
    assert Placement(swapped.ranks, ("cpu",) * 2).places == (1, 0)


def test_idle_ranks_take_part_and_run_nothing() -> None:
    placement = Placement((((1,),), ((2,),)), ("cpu",) * 2, idle=(0, 3))
    assert (placement.num_ranks, placement.places, placement.is_regular) == (4, (0, 1), False)
    assert placement.names == ["no stage", "stage 0", "stage 1", "no stage"]
    assert {placement.peers(rank, STAGE) for rank in range(4)} == {(0, 1, 2, 3)}
    assert [placement.place_of(rank) for rank in range(4)] == [2, 0, 1, 2]
    assert placement.groups(SHARD) == placement.groups(REPLICA) == [(n,) for n in range(4)]
    assert placement.spread((0, 1), ("cpu",) * 2) == placement
    with pytest.raises(PlanError, match="or is idle"):
        Placement((((1,),), ((2,),)), ("cpu",) * 2, idle=(2,))


@pytest.mark.parametrize("places", [(0,), (0, 0), (0, 2), (1, 2), (0, 1, 2)])
def test_places_that_are_not_one_for_each_mesh_are_refused(places: tuple[int, ...]) -> None:
    with pytest.raises(PlanError, match="give each stage the place of its mesh, of 2 that count"):
        Placement((((2,),), ((0, 1),)), ("cpu",) * 2, stage_places=places)
    with pytest.raises(PlanError, match="give each stage the place of its mesh, of 1 that count"):
        Placement((((0,),), ((0,),)), ("cpu",) * 2, stage_places=(0, 1))


def test_stages_may_have_unlike_meshes() -> None:
    placement = Placement((((0, 1), (2, 3)), ((4, 5, 6, 7),), ((8,),)), ("cpu",) * 3)
    assert not placement.is_regular
    assert (placement.places, placement.num_places, placement.num_ranks) == ((0, 1, 2), 3, 9)
    assert (placement.peers(3, SHARD), placement.peers(3, REPLICA)) == ((2, 3), (1, 3))
    assert (placement.peers(6, SHARD), placement.peers(6, REPLICA)) == ((4, 5, 6, 7), (6,))
    assert placement.peers(8, STAGE) == tuple(range(9))
    assert placement.name_of(6) == "stage 1, shard 2"
    with pytest.raises(PlanError, match=r"have \[1, 2\] replicas"):
        assert placement.num_replicas
