"""A breakdown accounts for every second of every rank, once."""

import json
from fractions import Fraction

import pytest

from penstock.schedules import (
    ALL_SCHEDULES,
    Backward,
    Forward,
    ReceiveActivation,
    SendActivation,
    gpipe,
    one_f_one_b,
    parse,
)
from penstock.schedules.passes import add_recompute
from penstock.simulator import UNIT_COSTS, Costs, simulate
from penstock.trace import Breakdown, Span, StageTimes, Timeline, breakdown

UNEVEN = Costs(
    forward_s=(1, 3, 2),
    backward_s=(2, 5, 3),
    recompute_s=(1, 3, Fraction(3, 2)),
    transfer_s=Fraction(1, 7),
)
SLOW_LINK = Costs(forward_s=1, backward_s=2, recompute_s=1, transfer_s=Fraction(1, 4))


@pytest.mark.parametrize("schedule", ALL_SCHEDULES)
@pytest.mark.parametrize("num_microbatches", [1, 2, 5])
def test_the_seconds_of_a_stage_add_up_to_no_less_than_the_ideal_step(schedule, num_microbatches):
    """A recompute that fills the wait for a gradient counts as use in the ideal step too."""
    program = add_recompute(schedule(3, num_microbatches))
    found = breakdown(timeline := simulate(program, UNEVEN))
    for stage in found.stages:
        assert stage.busy_s + stage.wait_s + stage.bubble_s == timeline.step_s
    assert found.utilisation + found.wait + found.bubble == 1
    assert (ideal := simulate(program, UNIT_COSTS)).breakdown().share_of_ideal == 1
    slow = simulate(program, SLOW_LINK).breakdown()
    assert 0 < slow.share_of_ideal < 1 and slow.ideal_step_s == ideal.step_s


def test_each_kind_of_work_is_counted_apart():
    found = breakdown(simulate(add_recompute(gpipe(3, 4)), UNEVEN))
    assert [stage.forward_s for stage in found.stages] == [4, 12, 8]
    assert [stage.recompute_s for stage in found.stages] == [4, 12, 6]
    assert [stage.backward_s for stage in found.stages] == [8, 20, 12]


def test_a_receive_waits_only_after_its_message_was_sent():
    # rank 0 |  F0 F0 >     sends from 2 to 2.25
    # rank 1 |  <  <  <  F0   receives from 0 to 3: bubble until 2.25, wait from there
    timeline = Timeline(
        (
            Span(0, Forward(0, 0), 0.0, 2.0),
            Span(0, SendActivation(0, 0, 1), 2.0, 2.25),
            Span(1, ReceiveActivation(1, 0, 0), 0.0, 3.0),
            Span(1, Forward(1, 0), 3.0, 4.0),
        )
    )
    assert breakdown(timeline).stages == (
        StageTimes(
            stage=0, rank=0, forward_s=2, recompute_s=0, backward_s=0, wait_s=0.25, bubble_s=1.75
        ),
        StageTimes(
            stage=1, rank=1, forward_s=1, recompute_s=0, backward_s=0, wait_s=0.75, bubble_s=2.25
        ),
    )


def test_a_message_that_was_there_before_costs_its_wake_up_and_one_without_a_send_is_bubble():
    sent = Span(0, SendActivation(0, 0, 1), 0.0, 1.0), Span(1, Forward(1, 9), 0.0, 4.0)
    timeline = Timeline((*sent, Span(1, ReceiveActivation(1, 0, 0), 4.0, 4.5)))
    assert breakdown(timeline).stages[1].wait_s == 0.5
    assert breakdown(Timeline((Span(0, ReceiveActivation(1, 0, 0), 0.0, 3.0),))).bubble == 1


def test_idle_time_counts_for_the_stage_that_runs_next_and_at_the_end_for_the_last():
    # rank 0 |  F0 .  F0 F0      stages 0 and 1
    # rank 1 |  .  F1 .  .  .    stage 2
    timeline = Timeline(
        (
            *(Span(0, Forward(0, 0), 0, 1), Span(0, Forward(1, 0), 2, 4)),
            *(Span(1, Forward(2, 0), 1, 2), Span(1, Backward(2, 0), 4, 5)),
        )
    )
    found = breakdown(timeline)
    assert {stage.stage: stage.bubble_s for stage in found.stages} == {0: 0, 1: 2, 2: 3}
    assert found.bubble == Fraction(5, 10)


def test_the_share_of_the_ideal_compares_with_equal_stages_and_free_messages():
    costs = Costs(forward_s=1, backward_s=2, recompute_s=1, transfer_s=1)
    found = breakdown(simulate(gpipe(2, 3), costs))
    assert found.step_s == 14
    assert found.utilisation == Fraction(18, 28)
    assert found.ideal_utilisation == Fraction(3, 4)
    assert found.share_of_ideal == Fraction(6, 7)


def test_nothing_happened_in_an_empty_timeline():
    found = breakdown(Timeline(()))
    assert found == Breakdown(stages=(), num_ranks=0, num_microbatches=0, step_s=0, ideal_step_s=0)
    assert (found.bubble, found.utilisation, found.share_of_ideal) == (0, 0, 0)


def test_a_breakdown_prints_as_a_table():
    assert str(simulate(add_recompute(one_f_one_b(2, 4)), UNIT_COSTS).breakdown()) == (
        "step 17.000 s; times in s\n"
        "stage  rank  forward  recompute  backward   wait  bubble\n"
        "    0     0    4.000      4.000     8.000  0.000   1.000\n"
        "    1     1    4.000      0.000     8.000  0.000   5.000\n"
        "bubble 17.6%, waiting for messages 0.0%, utilisation 82.4%: 100.0% of the ideal 82.4%"
    )


def test_a_breakdown_is_written_as_plain_numbers():
    data = json.loads(breakdown(simulate(gpipe(2, 3), SLOW_LINK)).to_json())
    assert data["step_s"] == 12.5
    assert data["bubble"] == pytest.approx(6.5 / 25)
    assert data["stages"][1] == {
        "stage": 1,
        "rank": 1,
        "forward_s": 3,
        "recompute_s": 0,
        "backward_s": 6,
        "wait_s": 0.25,
        "bubble_s": 3.25,
        "update_s": 0,
    }


def test_a_schedule_of_forwards_alone_has_a_breakdown():
    found = simulate(parse("rank 0 | 0F0 0F1\nrank 1 | 1F0 1F1"), UNIT_COSTS).breakdown()
    assert found.step_s == 3
    assert found.bubble == Fraction(1, 3)
