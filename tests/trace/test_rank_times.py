"""Where each rank's time went: kinds add up to the step, and load imbalance is what it says."""

from fractions import Fraction

import pytest

from penstock.schedules import ALL_SCHEDULES, Forward, gpipe, one_f_one_b, pipedream, zb_h1
from penstock.schedules.family import Family
from penstock.schedules.ir import CommitStatistics
from penstock.schedules.passes import add_recompute
from penstock.simulator import UNIT_COSTS, Costs, simulate
from penstock.trace.breakdown import KINDS, RankTimes, mean_times, rank_times, share
from penstock.trace.timeline import Span, Timeline

UNEVEN = Costs(
    forward_s=(1, 2, 1, 1),
    backward_s=(2, 4, 2, 2),
    recompute_s=(1, 2, 1, 1),
    transfer_s=Fraction(1, 3),
    backward_input_s=(1, 2, 1, 1),
    backward_weight_s=(1, 2, 1, 1),
)


@pytest.mark.parametrize("family", ALL_SCHEDULES, ids=str)
def test_kinds_add_up_to_the_step_on_every_rank(family: Family) -> None:
    timeline = simulate(family(4, 6), UNEVEN)
    times = rank_times(timeline)
    assert [rank.rank for rank in times] == list(range(timeline.num_ranks))
    assert {rank.total_s for rank in times} == {timeline.step_s}
    assert all(getattr(rank, kind) >= 0 for rank in times for kind in KINDS)


@pytest.mark.parametrize("transfer_s", [0, Fraction(1, 2), 3])
def test_equal_stages_have_no_load_imbalance_whatever_messages_take(transfer_s: Fraction) -> None:
    costs = Costs(forward_s=1, backward_s=2, recompute_s=1, transfer_s=transfer_s)
    for family in (gpipe, one_f_one_b):
        timeline = simulate(add_recompute(family(4, 8)), costs)
        assert [rank.imbalance_s for rank in rank_times(timeline)] == [0, 0, 0, 0]


def test_the_bubble_of_equal_stages_is_the_papers() -> None:
    times = rank_times(simulate(gpipe(4, 8), UNIT_COSTS))
    assert {share(rank.bubble_s, rank.total_s) for rank in times} == {Fraction(3, 11)}


def test_load_imbalance_is_idle_time_beyond_that_of_equal_stages() -> None:
    # Equal stages would take 1.5 and 3: a step of 5 x 4.5, of which each rank idles 4.5.
    # These end at 1 + 4 x 2 + 4 x 4 + 2 = 27; rank 0 works for 12 of it, rank 1 for 24.
    costs = Costs(forward_s=(1, 2), backward_s=(2, 4), recompute_s=0, transfer_s=0)
    first, second = rank_times(simulate(gpipe(2, 4), costs))
    assert (first.total_s, first.bubble_s, first.imbalance_s) == (27, 4.5, 10.5)
    assert (second.bubble_s, second.imbalance_s) == (3, 0)


def test_work_counts_by_what_it_is() -> None:
    (*_, split), (*_, whole) = (
        rank_times(simulate(schedule, UNEVEN))
        for schedule in (zb_h1()(4, 12), add_recompute(gpipe(4, 12)))
    )
    assert split.forward_s == whole.forward_s == whole.recompute_s == 12
    assert split.weight_s > 0 and split.backward_s + split.weight_s == whole.backward_s == 24
    assert split.recompute_s == 0 and whole.weight_s == 0


def test_updates_within_a_schedule_count_as_the_optimizer() -> None:
    costs = Costs(forward_s=1, backward_s=2, recompute_s=1, transfer_s=0, update_s=1)
    times = rank_times(simulate(pipedream()(2, 3), costs))
    assert all(rank.optimizer_s > 0 for rank in times)


def test_what_lies_outside_of_the_timeline_lengthens_the_step() -> None:
    rank = RankTimes(rank=0, forward_s=3, optimizer_s=1).with_rest(optimizer_s=2, set_up_s=4)
    assert (rank.optimizer_s, rank.set_up_s, rank.total_s) == (3, 4, 10)
    assert mean_times([rank, RankTimes(rank=1, forward_s=5)])["forward_s"] == 4


def test_updates_of_statistics_are_work_in_all_figures() -> None:
    spans = (Span(0, Forward(0, 0), 0.0, 1.0), Span(0, CommitStatistics(0), 1.0, 4.0))
    step = Timeline(spans)
    assert step.bubble == 0 and step.breakdown().share_of_ideal == 1
    (times,) = rank_times(step)
    assert (times.forward_s, times.bubble_s, times.imbalance_s) == (4, 0, 0)
