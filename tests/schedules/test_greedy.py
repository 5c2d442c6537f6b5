"""The list scheduler: whatever the ranks, costs and limits, what it makes can be run."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.schedules import Forward, Schedule, ir, parse
from penstock.schedules.greedy import Policy, best_of, timetable
from penstock.schedules.passes import add_communication
from penstock.schedules.transfers import chain_transfers
from penstock.schedules.verify import verify
from penstock.simulator import UNIT_COSTS, Costs, simulate

SECONDS = st.integers(0, 5)


def a_priority(is_backward: bool, stage: int, microbatch: int) -> tuple[int, ...]:
    """Prefer what a later stage does, forwards and backwards mixed."""
    return (microbatch % 3, -stage, is_backward)


@st.composite
def runs(draw: st.DrawFn) -> tuple[Policy, tuple[int, ...], int, Costs]:
    """Draw a policy, who runs each stage, the number of micro-batches, and costs."""
    num_stages = draw(st.integers(1, 8))
    num_ranks = draw(st.integers(1, num_stages))
    others = draw(st.lists(st.integers(0, num_ranks - 1), min_size=num_stages - num_ranks))
    ranks = tuple(draw(st.permutations([*range(num_ranks), *others[: num_stages - num_ranks]])))
    each = st.tuples(*[SECONDS] * num_stages)
    policy = Policy(
        live=draw(st.tuples(*[st.integers(1, 6)] * num_ranks)),
        priority=a_priority,
        ahead=draw(st.none() | st.tuples(*[st.integers(1, 4)] * num_stages)),
        patient=draw(st.booleans()),
        divides=draw(st.booleans()),
    )
    inputs, weights = draw(each), draw(each)
    costs = Costs(
        forward_s=draw(each),
        backward_s=tuple(i + w for i, w in zip(inputs, weights, strict=True)),
        recompute_s=0,
        transfer_s=draw(st.integers(0, 3)),
        backward_input_s=inputs,
        backward_weight_s=weights,
    )
    return policy, ranks, draw(st.integers(1, 9)), costs


@given(runs())
def test_what_it_makes_is_proved_and_takes_the_time_that_it_foretold(
    run: tuple[Policy, tuple[int, ...], int, Costs],
) -> None:
    policy, ranks, num_microbatches, costs = run
    table = timetable(policy, ranks, num_microbatches, costs)
    schedule, chain = table.schedule(), chain_transfers(len(ranks))
    proof = verify(add_communication(schedule, chain), chain)
    assert (proof.num_stages, proof.num_microbatches) == (len(ranks), num_microbatches)
    assert schedule.ranks == ranks
    assert simulate(schedule, costs).step_s == table.step_s


@given(runs())
def test_no_rank_keeps_more_than_it_may(
    run: tuple[Policy, tuple[int, ...], int, Costs],
) -> None:
    policy, ranks, num_microbatches, costs = run
    schedule = timetable(policy, ranks, num_microbatches, costs).schedule()
    for rank, program in enumerate(schedule.programs):
        live, begun = 0, dict.fromkeys(range(len(ranks)), 0)
        for x in program:
            live += isinstance(x, Forward) - isinstance(x, ir.ADDS_GRADIENTS)
            begun[x.stage] += isinstance(x, Forward) - isinstance(x, ir.GIVES_GRADIENTS)
            assert live <= max(policy.live[rank], ranks.count(rank))
            assert policy.ahead is None or begun[x.stage] <= policy.ahead[x.stage]


def test_an_order_is_kept_and_weights_fill_its_gaps() -> None:
    order = [(kind, 0, i) for i in range(2) for kind in (False, True)]
    last = [(kind, 1, i) for i in range(2) for kind in (False, True)]
    policy = Policy(live=[1, 2], orders=[order, last])
    assert timetable(policy, (0, 1), 2, UNIT_COSTS).schedule() == parse("""
        rank 0 | 0F0 0B0 0F1 0B1
        rank 1 | 1F0 1I0 1W0 1F1 1I1 1W1
    """)


def test_two_parts_stay_two_where_the_stage_before_waits_for_the_first() -> None:
    def made(transfer_s: int | Fraction) -> Schedule:
        costs = Costs(forward_s=1, backward_s=2, recompute_s=1, transfer_s=transfer_s)
        return timetable(Policy(live=[1, 1]), (0, 1), 1, costs).schedule()

    assert made(0) == parse("rank 0 | 0F0 0B0\nrank 1 | 1F0 1I0 1W0")
    assert made(Fraction(1, 3)) == made(0)


def test_a_patient_rank_waits_for_what_comes_in_before_a_weights_part_would_end() -> None:
    costs = Costs(
        forward_s=(3, 1),
        backward_s=11,
        recompute_s=0,
        backward_input_s=1,
        backward_weight_s=10,
    )
    first = parse("rank 0 | 0F0 0F1 0B0 0B1\nrank 1 | 1F0 1I0 1W0 1F1 1I1 1W1")
    later = parse("rank 0 | 0F0 0F1 0B0 0B1\nrank 1 | 1F0 1I0 1F1 1I1 1W0 1W1")
    for patient, expected in ((False, first), (True, later)):
        policy = Policy(live=[2, 2], patient=patient)
        assert timetable(policy, (0, 1), 2, costs).schedule() == expected


def test_the_policy_of_the_shortest_step_is_chosen() -> None:
    policies = [Policy(live=[2, 2], divides=divides) for divides in (False, True)]
    tables = [timetable(policy, (0, 1), 4, UNIT_COSTS) for policy in policies]
    assert tables[1].step_s < tables[0].step_s
    assert best_of(policies, (0, 1), 4, UNIT_COSTS) == tables[1].schedule()


def test_costs_of_another_number_of_stages_are_refused() -> None:
    costs = Costs(forward_s=(1, 1, 1), backward_s=2, recompute_s=0)
    with pytest.raises(ConfigError, match="has 3 entries, the schedule has 2 stages"):
        best_of([Policy(live=[1, 1])], (0, 1), 4, costs)
