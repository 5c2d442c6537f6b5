"""The simulator predicts exactly when each instruction runs."""

from fractions import Fraction
from itertools import product

import pytest

from penstock.errors import ConfigError
from penstock.schedules import (
    Schedule,
    eager_1f1b,
    gpipe,
    one_f_one_b,
    parse,
    zb_v,
)
from penstock.schedules.passes import add_commits, add_communication, add_recompute
from penstock.schedules.transfers import Transfer, chain_transfers
from penstock.simulator import UNIT_COSTS, Costs, simulate
from penstock.trace import Timeline


def boxes(timeline: Timeline) -> dict[str, tuple[object, object]]:
    """Map each instruction's word to its start and end, leaving out those that take no time."""
    words = [str(Schedule(((span.instruction,),))).partition("| ")[2] for span in timeline.spans]
    times = [(span.start_s, span.end_s) for span in timeline.spans]
    return {word: at for word, at in zip(words, times, strict=True) if at[0] < at[1]}


@pytest.mark.parametrize("schedule", (gpipe, one_f_one_b, eager_1f1b))
def test_the_bubble_is_p_minus_1_of_m_plus_p_minus_1_and_ranks_run_in_order(schedule) -> None:
    for p, m in product(range(1, 6), range(1, 9)):
        timeline = simulate(schedule(p, m), UNIT_COSTS)
        assert timeline.bubble == Fraction(p - 1, m + p - 1)
        assert timeline.breakdown().share_of_ideal == 1
        lowered = add_communication(add_recompute(schedule(p, m)), chain_transfers(p))
        timeline = simulate(lowered, UNIT_COSTS)
        assert timeline.schedule == lowered
        for before, after in zip(timeline.spans, timeline.spans[1:], strict=False):
            assert before.rank != after.rank or before.end_s <= after.start_s


class TestExactTimes:
    def test_two_stages_two_microbatches(self):
        # second    0  1  2  3  4  5  6  7  8
        # rank 0 |  F0 F1 .  .  B0 -- .  B1 --
        # rank 1 |  .  F0 B0 -- F1 B1 -- .  .
        schedule = parse("rank 0 | 0F0 0F1 0B0 0B1\nrank 1 | 1F0 1B0 1F1 1B1")
        assert boxes(simulate(schedule, UNIT_COSTS)) == {
            "0F0": (0, 1),
            "0F1": (1, 2),
            "0B0": (4, 6),
            "0B1": (7, 9),
            "0B0<1": (2, 4),
            "0B1<1": (6, 7),
            "1F0<0": (0, 1),
            "1F0": (1, 2),
            "1B0": (2, 4),
            "1F1": (4, 5),
            "1B1": (5, 7),
        }

    def test_each_stage_has_its_own_costs(self):
        costs = Costs(forward_s=(1, 3), backward_s=(5, 7), recompute_s=0)
        assert boxes(simulate(gpipe(2, 1), costs)) == {
            "0F0": (0, 1),
            "1F0<0": (0, 1),
            "1F0": (1, 4),
            "1B0": (4, 11),
            "0B0<1": (1, 11),
            "0B0": (11, 16),
        }

    def test_a_message_arrives_after_its_transfer_while_its_sender_goes_on(self):
        costs = Costs(
            forward_s=1, backward_s=2, recompute_s=1, transfer_s={(0, 1): Fraction(1, 2)}
        )
        found = boxes(simulate(gpipe(2, 2), costs))
        assert found["0F1"] == (1, 2)
        assert found["1F0<0"] == (0, Fraction(3, 2))
        assert found["1F0"] == (Fraction(3, 2), Fraction(5, 2))
        assert found["1F1"] == (Fraction(5, 2), Fraction(7, 2))  # its message came before, at 5/2
        assert found["0B0"] == (6, 8)

    def test_a_rank_computes_nothing_while_it_sends_and_takes_in(self):
        costs = Costs(
            forward_s=1, backward_s=2, recompute_s=1, transfer_s=1, send_s=(2, 3), receive_s=(5, 4)
        )
        found = boxes(simulate(gpipe(2, 2), costs))
        assert found["0F0>1"] == (1, 3)
        assert found["0F1"] == (3, 4)
        assert found["1F0<0"] == (0, 8)  # it came at 4
        assert found["1F1<0"] == (9, 13)  # it had come at 7
        assert found["1B0>0"] == (16, 19)
        assert found["0B0<1"] == (6, 25)

    def test_a_message_that_stays_on_its_rank_takes_no_time(self):
        costs = Costs(forward_s=1, backward_s=2, transfer_s=9, send_s=9, receive_s=9)
        schedule = zb_v()(2, 3)
        assert simulate(schedule, costs) == simulate(schedule, Costs(forward_s=1, backward_s=2))

    def test_a_recompute_runs_while_the_gradient_is_awaited(self):
        found = boxes(simulate(add_recompute(gpipe(2, 2)), UNIT_COSTS))
        assert found["1B0"] == (4, 6)
        assert found["0R0"] == (2, 3)
        assert found["0B0<1"] == (3, 6)
        assert found["0B0"] == (6, 8)

    def test_a_recompute_takes_as_long_as_its_forward_unless_it_is_given(self):
        schedule, seconds = add_recompute(gpipe(2, 2)), (1, Fraction(5, 2))
        without = Costs(forward_s=seconds, backward_s=2)
        given = Costs(forward_s=seconds, backward_s=2, recompute_s=seconds)
        longer = Costs(forward_s=seconds, backward_s=2, recompute_s=9)
        assert simulate(schedule, without) == simulate(schedule, given)
        assert simulate(schedule, without) != simulate(schedule, longer)

    @pytest.mark.parametrize("num_stages", [2, 3, 4])
    def test_running_ahead_hides_transfers(self, num_stages):
        costs = Costs(forward_s=1, backward_s=2, recompute_s=1, transfer_s=Fraction(1, 2))
        step_s = [simulate(s(num_stages, 16), costs).step_s for s in (gpipe, eager_1f1b)]
        assert step_s == [3 * (16 + num_stages - 1) + num_stages - 1] * 2  # fill and drain only
        assert simulate(one_f_one_b(num_stages, 16), costs).step_s > step_s[1]

    def test_an_edge_that_skips_a_stage_is_priced_on_its_own(self):
        transfers = (*chain_transfers(3), Transfer(producer=0, consumer=2))
        seconds = {(0, 1): 0, (1, 2): 0, (0, 2): 10}
        costs = Costs(forward_s=1, backward_s=2, recompute_s=1, transfer_s=seconds)
        found = boxes(simulate(gpipe(3, 1), costs, transfers=transfers))
        assert found["2F0"] == (11, 12)
        assert found["0B0"] == (24, 26)

    def test_committing_statistics_takes_no_time(self):
        schedule = gpipe(2, 3)
        committing = add_commits(schedule, range(2))
        assert simulate(committing, UNIT_COSTS).step_s == simulate(schedule, UNIT_COSTS).step_s

    def test_exact_costs_give_exact_times_however_odd(self):
        third = Fraction(1, 3)
        costs = Costs(forward_s=third, backward_s=2 * third, recompute_s=third)
        timeline = simulate(gpipe(3, 4), costs)
        assert timeline.step_s == 6
        assert timeline.bubble == Fraction(1, 3)


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        ({"send_s": None}, "send_s is None, a NoneType: give a number"),
        ({"forward_s": (1, 1)}, "Costs.forward_s has 2 entries, the schedule has 3 stages"),
        ({"transfer_s": {(0, 1): 1}}, r"Costs.transfer_s has no entry for edge \(1, 2\)"),
        ({"backward_s": -1}, "backward_s is -1: no instruction takes less than 0 seconds"),
        ({"recompute_s": (0, -2, 0)}, r"recompute_s\[1\] is -2"),
        ({"forward_s": float("nan")}, "forward_s is nan: give a finite number"),
        ({"forward_s": 10**400}, "forward_s is no number that a float holds"),
        ({"forward_s": "1"}, "forward_s is '1', a str: give a number"),
        ({"forward_s": [1, 2, 3]}, r"forward_s is \[1, 2, 3\], a list: give a tuple"),
        ({"backward_s": (1, None, 2)}, r"backward_s\[1\] is None, a NoneType"),
        ({"transfer_s": (1, 2)}, r"transfer_s holds 1: .* a mapping"),
        ({"transfer_s": {(0, 1): -3}}, r"transfer_s\[\(0, 1\)\] is -3"),
    ],
)
def test_costs_that_do_not_fit_are_refused_with_their_values(costs, message):
    with pytest.raises(ConfigError, match=message):
        simulate(gpipe(3, 2), Costs(**{"forward_s": 1, "backward_s": 2, "recompute_s": 1} | costs))


def test_a_rank_computes_nothing_while_it_moves_what_it_keeps() -> None:
    moved = parse("rank 0 | 0F0 0H0 0F1 0F2 0D0 0B0 0B1 0B2")
    costs = Costs(forward_s=1, backward_s=2, recompute_s=1, offload_s=(Fraction(1, 2),), fetch_s=3)
    timeline = simulate(moved, costs)
    assert boxes(timeline)["0H0"] == (1, Fraction(3, 2))
    assert boxes(timeline)["0D0"] == (Fraction(7, 2), Fraction(13, 2))
    assert timeline.step_s == 3 * (1 + 2) + Fraction(7, 2)
    assert timeline.breakdown().stages[0].wait_s == Fraction(7, 2)
