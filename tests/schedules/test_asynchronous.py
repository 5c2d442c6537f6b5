"""Schedules in which weights change: their grids, their versions, and what is refused of them."""

from typing import Any

import pytest

from penstock.errors import ConfigError, ScheduleError
from penstock.schedules import (
    Family,
    Forward,
    Schedule,
    UpdateWeights,
    one_f_one_b,
    parse,
    pipedream_2bw,
)
from penstock.schedules import pipedream as pipedream_of
from penstock.schedules.ir import ADDS_GRADIENTS
from penstock.schedules.laws import ASYNCHRONOUS, verify
from penstock.schedules.lower import Lowering, Mode, lower
from penstock.schedules.memory import num_versions, version_bytes
from penstock.schedules.names import ASYNCHRONOUS_SCHEDULES
from penstock.schedules.transfers import chain_transfers
from penstock.simulator import Costs, simulate

SIZES = [(p, m, w) for p in (1, 2, 3, 5) for m in (1, 2, 3, 8) for w in (1, 2, 5)]
"""(stages, micro-batches of a mini-batch, mini-batches)."""


def short(schedule: Schedule) -> list[str]:
    """Write each program as in the docstrings: without stages."""
    programs = schedule.programs
    return [" ".join(str(x).removeprefix(str(x.stage)) for x in program) for program in programs]


def lowered(family: Family, p: int, m: int, w: int, **options: Any) -> Schedule:
    how = Lowering(family=family, ranks=tuple(range(p)), transfers=chain_transfers(p), **options)
    return lower(how, m, num_minibatches=w)


def test_2bw_runs_on_from_one_minibatch_to_the_next() -> None:
    assert short(pipedream_2bw(3, 2, 3)) == [
        "F0 F1 F2 B0 F3 B1 U F4@1 B2 F5@1 B3 U B4 B5 U",
        "F0 F1 B0 F2 B1 U F3 B2 F4@1 B3 U F5@1 B4 B5 U",
        "F0 B0 F1 B1 U F2 B2 F3 B3 U F4@1 B4 F5@1 B5 U",
    ]


def test_pipedream_updates_after_every_microbatch() -> None:
    assert short(pipedream_of()(3, 1, 4)) == [
        "F0 F1 F2 B0 U F3@1 B1 U B2 U B3 U",
        "F0 F1 B0 U F2@1 B1 U F3@2 B2 U B3 U",
        "F0 B0 U F1@1 B1 U F2@2 B2 U F3@3 B3 U",
    ]
    assert pipedream_of()(3, 1, 4) == pipedream_of()(3, 2, 2) == pipedream_of()(3, 4)
    assert short(pipedream_of(vertical_sync=True)(3, 1, 4))[2] == (
        "F0 B0 U F1 B1 U F2 B2 U F3@1 B3 U"
    )


def test_2bw_waits_for_a_version_where_microbatches_are_fewer_than_stages() -> None:
    assert short(pipedream_2bw(4, 1, 4))[0] == "F0 F1 B0 U F2@1 B1 U F3@2 B2 U B3 U"


@pytest.mark.parametrize("family", ASYNCHRONOUS_SCHEDULES, ids=repr)
@pytest.mark.parametrize(("p", "m", "w"), SIZES)
def test_every_size_keeps_all_laws_with_all_passes(family, p, m, w) -> None:
    stages = range(p)
    schedule = lowered(family, p, m, w, recompute=stages, commits=stages, posts=True)
    assert parse(str(schedule)) == schedule
    simulate(schedule, Costs(forward_s=1, backward_s=2, recompute_s=1, update_s=1))
    every = family.microbatches_per_update(m)
    updates = [x for x in schedule.instructions if isinstance(x, UpdateWeights)]
    assert len(updates) == p * m * w // every
    for mode in (Mode.EVAL, Mode.FORWARDS, Mode.BACKWARDS):
        how = Lowering(family=family, ranks=tuple(stages), transfers=chain_transfers(p))
        of_mode = lower(how, m, mode)
        assert not [x for x in of_mode.instructions if isinstance(x, UpdateWeights)]
        assert not [x for x in of_mode.instructions if isinstance(x, Forward) and x.version]


@pytest.mark.parametrize(("p", "m", "w"), SIZES)
def test_the_number_of_versions_is_the_published_one(p, m, w) -> None:
    assert max(num_versions(pipedream_2bw(p, m, w))) <= 2
    stashed = num_versions(pipedream_of()(p, m, w))
    synchronised = num_versions(pipedream_of(vertical_sync=True)(p, m, w))
    assert all(number <= p - s for s, number in enumerate(stashed))
    assert max(synchronised) <= p
    if m * w >= 2 * p:
        assert stashed == tuple(p - s for s in range(p))
        assert synchronised == (p,) * p


def test_the_bytes_of_versions_are_those_beside_the_newest() -> None:
    assert version_bytes(pipedream_of()(3, 1, 8), (100, 10, 1)) == (200, 10, 0)
    assert version_bytes(one_f_one_b(3, 8), (100, 10, 1)) == (0, 0, 0)


def test_without_a_flush_no_rank_idles_between_minibatches() -> None:
    costs = Costs(forward_s=1, backward_s=2, recompute_s=1)
    p, m, w = 3, 4, 50
    assert simulate(pipedream_2bw(p, m, w), costs).step_s == 3 * (m * w + p - 1)


def test_an_update_counts_as_work_of_its_stage() -> None:
    costs = Costs(forward_s=1, backward_s=2, recompute_s=1, update_s=(5, 7))
    timeline = simulate(pipedream_2bw(2, 2, 2), costs)
    stages = timeline.breakdown().stages
    assert [stage.update_s for stage in stages] == [10, 14]
    assert "update" in str(timeline.breakdown())
    assert "update" not in str(simulate(one_f_one_b(2, 2), costs).breakdown())


def broken(word: str, by: str) -> Schedule:
    """Put other words in the place of one of 2BW's, for 2 stages, 2 mini-batches of 2."""
    text = str(lowered(pipedream_2bw, 2, 2, 3, commits=[0, 1]))
    text = " ".join(text.split(" "))
    assert f" {word} " in text
    return parse(text.replace(f" {word} ", f" {by} ", 1))


@pytest.mark.parametrize(
    ("word", "by", "said"),
    [
        ("0F4@1", "0F4", "sees version 0 of the weights, and the family says 1"),
        ("0F0", "0F0@1", "were updated 0 times so far, not 1"),
        ("0B0", "0U 0B0", "as many updates"),
        ("1C", "", "statistics are committed once for every 2"),
    ],
)
def test_a_broken_schedule_is_refused_with_the_spot(word, by, said) -> None:
    with pytest.raises(ScheduleError, match=said):
        verify(broken(word, by), chain_transfers(2), pipedream_2bw.laws)


def test_an_update_before_the_last_backward_is_refused() -> None:
    early = parse("rank 0 | 0F0 0B0 0F1 0U 0B1 0F2 0B2 0F3 0B3 0U")
    with pytest.raises(ScheduleError, match="update 1 comes after 2 micro-batches' gradients"):
        verify(early, (), ASYNCHRONOUS)


def test_weights_of_a_synchronous_family_do_not_change() -> None:
    for text in ("rank 0 | 0F0 0B0 0U", "rank 0 | 0F0@1 0B0"):
        with pytest.raises(ScheduleError, match=r"synchronous|nothing updates"):
            verify(parse(text), ())


def test_a_synchronous_family_has_one_minibatch() -> None:
    with pytest.raises(ConfigError, match="one mini-batch, and 2 were asked for"):
        one_f_one_b(2, 2, 2)


@pytest.mark.parametrize("family", ASYNCHRONOUS_SCHEDULES, ids=repr)
def test_every_backward_comes_after_the_update_of_no_later_minibatch(family) -> None:
    schedule = family(4, 2, 3)
    for program in schedule.programs:
        updates, done = 0, 0
        for x in program:
            updates += isinstance(x, UpdateWeights)
            if isinstance(x, ADDS_GRADIENTS):
                assert updates == done // family.microbatches_per_update(2)
                done += 1
