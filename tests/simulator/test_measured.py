"""Costs from a timeline: those that made it, if the simulator did."""

from dataclasses import replace

import pytest

from penstock.errors import ConfigError
from penstock.schedules import (
    Family,
    breadth_first,
    eager_1f1b,
    gpipe,
    one_f_one_b,
    parse,
    zb_h1,
    zb_v,
)
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
    send_s=(1, 2, 1),
    receive_s=(1, 1, 1),
    backward_input_s=(4, 4, 2),
    backward_weight_s=(3, 2, 3),
)


def test_a_simulated_step_gives_back_the_costs_that_made_it() -> None:
    schedule = add_recompute(divided(3, 6), (0, 1))
    found = measured_costs(simulate(schedule, COSTS))
    assert found == replace(COSTS, recompute_s=(2, 3, 3))  # the last stage recomputes nothing
    assert simulate(schedule, found) == simulate(schedule, COSTS)


@pytest.mark.parametrize("transfer_s", (1, 3, 5))
@pytest.mark.parametrize("family", (gpipe, one_f_one_b, eager_1f1b, zb_h1()))
def test_what_messages_cost_is_found_whoever_waits(family: Family, transfer_s: int) -> None:
    costs = replace(COSTS, transfer_s=transfer_s)
    found = measured_costs(simulate(family(3, 12), costs))
    edges = (((0, 1), transfer_s), ((1, 2), transfer_s))
    assert (found.send_s, found.receive_s) == (costs.send_s, costs.receive_s)
    assert found.transfer_s == edges


def test_of_whole_backwards_each_part_is_taken_for_half() -> None:
    found = measured_costs(simulate(eager_1f1b(3, 8), COSTS))
    halves = (3.5, 3, 2.5)
    assert found == replace(
        COSTS, recompute_s=(1, 2, 3), backward_input_s=halves, backward_weight_s=halves
    )


def test_the_median_counts_of_instructions_and_of_messages() -> None:
    costs = Costs(forward_s=(1, 2), backward_s=4, recompute_s=1, transfer_s=1)
    spans = simulate(one_f_one_b(2, 9), costs).spans
    slow = [
        span._replace(end_s=span.end_s + 50) if str(span.instruction) in {"0F0", "1F1<0"} else span
        for span in spans
    ]
    found = measured_costs(Timeline(tuple(slow)))
    assert (found.forward_s, found.receive_s) == ((1, 2), (0, 0))
    assert found.transfer_s == (((0, 1), 1),)


def test_a_message_that_stays_on_its_rank_is_taken_for_one_that_does_not() -> None:
    costs = replace(UNIT_COSTS, transfer_s=3, send_s=2, receive_s=1)
    found = measured_costs(simulate(zb_v()(4, 9), costs))
    assert found.transfer_s == (((0, 1), 3), ((1, 2), 3), ((2, 3), 3))
    assert simulate(one_f_one_b(4, 9), found).step_s == simulate(one_f_one_b(4, 9), costs).step_s


def test_messages_that_all_stay_on_their_rank_cost_nothing() -> None:
    costs = replace(UNIT_COSTS, transfer_s=9, send_s=9, receive_s=9)
    found = measured_costs(simulate(zb_v()(2, 3), costs))
    assert (found.transfer_s, found.send_s, found.receive_s) == ((((0, 1), 0),), (0, 0), (0, 0))


def test_an_edge_where_nobody_waited_is_taken_for_no_slower_than_others() -> None:
    costs = replace(UNIT_COSTS, transfer_s=1)
    found = measured_costs(simulate(breadth_first(2)(8, 8), costs))
    assert found.transfer_s == tuple(((edge, edge + 1), 1) for edge in range(7))


def test_a_timeline_that_lacks_a_rank_is_refused() -> None:
    spans = simulate(one_f_one_b(3, 4), UNIT_COSTS).spans
    with pytest.raises(ConfigError, match=r"no send for 0B0<1 on rank 0.*of all ranks"):
        measured_costs(Timeline(tuple(span for span in spans if span.rank == 0)))


def test_a_timeline_without_a_backward_is_refused() -> None:
    forwards = simulate(parse("rank 0 | 0F0 0F1"), UNIT_COSTS)
    with pytest.raises(ConfigError, match="no Backward of stage 0, so what one takes"):
        measured_costs(forwards)


def test_no_timeline_is_refused_with_how_to_get_one() -> None:
    with pytest.raises(ConfigError, match=r"given None instead of a timeline.*trace=True"):
        measured_costs(None)  # type: ignore[arg-type]
