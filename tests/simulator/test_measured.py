"""Costs from a timeline: those that made it, if the simulator did."""

from dataclasses import replace

import pytest

from penstock.errors import ConfigError
from penstock.schedules import eager_1f1b, one_f_one_b, parse
from penstock.schedules.costs import Costs
from penstock.schedules.passes import add_recompute
from penstock.simulator import UNIT_COSTS, measured_costs, simulate
from penstock.trace.timeline import Timeline
from tests.every_schedule import divided

COSTS = Costs(
    forward_s=(1, 2, 3),
    backward_s=(7, 6, 5),
    recompute_s=(2, 3, 4),
    transfer_s={(0, 1): 1, (1, 2): 2},
    backward_input_s=(4, 4, 2),
    backward_weight_s=(3, 2, 3),
)


def test_a_simulated_step_gives_back_the_costs_that_made_it() -> None:
    schedule = add_recompute(divided(3, 6), (0, 1))
    found = measured_costs(simulate(schedule, COSTS))
    assert found == replace(COSTS, recompute_s=(2, 3, 3))  # the last stage recomputes nothing
    assert simulate(schedule, found) == simulate(schedule, COSTS)


def test_of_whole_backwards_each_part_is_taken_for_half() -> None:
    found = measured_costs(simulate(eager_1f1b(3, 8), COSTS))
    halves = (3.5, 3, 2.5)
    assert found == replace(
        COSTS, recompute_s=(1, 2, 3), backward_input_s=halves, backward_weight_s=halves
    )


def test_the_median_counts_of_instructions_and_the_shortest_of_messages() -> None:
    costs = Costs(forward_s=(1, 2), backward_s=4, recompute_s=1, transfer_s=1)
    spans = simulate(one_f_one_b(2, 5), costs).spans
    slow = [
        span._replace(end_s=span.end_s + 50) if str(span.instruction) in {"0F0", "1F1<0"} else span
        for span in spans
    ]
    found = measured_costs(Timeline(tuple(slow)))
    assert (found.forward_s, found.transfer_s) == ((1, 2), (((0, 1), 1),))


def test_a_timeline_without_a_backward_is_refused() -> None:
    forwards = simulate(parse("rank 0 | 0F0 0F1"), UNIT_COSTS)
    with pytest.raises(ConfigError, match="no Backward of stage 0, so what one takes"):
        measured_costs(forwards)


def test_no_timeline_is_refused_with_how_to_get_one() -> None:
    with pytest.raises(ConfigError, match=r"given None instead of a timeline.*trace=True"):
        measured_costs(None)  # type: ignore[arg-type]
