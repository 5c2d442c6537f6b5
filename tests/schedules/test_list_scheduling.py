"""The list scheduler: whatever the ranks, costs and limits, what it makes can be run."""

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.schedules import AtMostBytes, Schedule, Sizes, parse
from penstock.schedules.laws import verify
from penstock.schedules.list_scheduling import Policy, best_of, built
from penstock.schedules.passes import add_communication, add_recompute
from penstock.schedules.problem import (
    FORWARD,
    INPUT,
    Problem,
    fits,
    joined,
    least_bytes,
    length,
    problem_of,
    schedule_of,
)
from penstock.schedules.transfers import chain_transfers
from penstock.simulator import UNIT_COSTS, Costs, simulate

SECONDS, BYTES = st.integers(0, 5), st.integers(0, 9)


def a_priority(is_backward: bool, stage: int, microbatch: int) -> tuple[int, ...]:
    """Prefer what a later stage does, forwards and backwards mixed."""
    return (microbatch % 3, -stage, is_backward)


@st.composite
def policies(draw: st.DrawFn, num_stages: int) -> Policy:
    each = st.tuples(*[st.integers(1, 4)] * num_stages)
    return Policy(
        priority=a_priority,
        ahead=draw(st.just(()) | each),
        whole=draw(st.frozensets(st.integers(0, num_stages - 1))),
        patience=draw(st.sampled_from((0, 0.5, 1))),
    )


@st.composite
def drawn_costs(draw: st.DrawFn, num_stages: int) -> Costs:
    each = st.tuples(*[SECONDS] * num_stages)
    inputs, weights = draw(each), draw(each)
    more = draw(st.integers(0, 1))
    return Costs(
        forward_s=draw(each),
        backward_s=tuple(i + w + more for i, w in zip(inputs, weights, strict=True)),
        recompute_s=draw(each),
        transfer_s=draw(st.integers(0, 3)),
        send_s=draw(st.integers(0, 2)),
        receive_s=draw(each),
        backward_input_s=inputs,
        backward_weight_s=weights,
    )


@st.composite
def memories(draw: st.DrawFn, ranks: tuple[int, ...], recompute: tuple[int, ...]) -> AtMostBytes:
    """Draw sizes, and limits that are hardly more than what ranks need."""
    each = st.tuples(*[BYTES] * len(ranks))
    inputs = draw(each)
    graphs = tuple(i + more for i, more in zip(inputs, draw(each), strict=True))
    sizes = Sizes(kept_bytes=graphs, input_bytes=inputs, weight_bytes=draw(each))
    memory = AtMostBytes(sizes, 0)
    problem = problem_of(UNIT_COSTS, memory, ranks, 1, recompute)
    limits = (least_bytes(problem, stages) + draw(BYTES) for stages in problem.stages)
    return replace(memory, limit_bytes=tuple(limits))


Run = tuple[Problem, Policy, Costs, AtMostBytes | None, tuple[int, ...]]


@st.composite
def runs(draw: st.DrawFn) -> Run:
    """Draw who runs each stage, the number of micro-batches, costs, a limit and a policy."""
    num_stages = draw(st.integers(1, 8))
    num_ranks = draw(st.integers(1, num_stages))
    others = draw(st.lists(st.integers(0, num_ranks - 1), min_size=num_stages - num_ranks))
    ranks = tuple(draw(st.permutations([*range(num_ranks), *others[: num_stages - num_ranks]])))
    recompute = tuple(draw(st.sets(st.integers(0, num_stages - 1))))
    costs = draw(drawn_costs(num_stages))
    memory = draw(st.none() | memories(ranks, recompute))
    problem = problem_of(costs, memory, ranks, draw(st.integers(1, 9)), recompute)
    return problem, draw(policies(num_stages)), costs, memory, recompute


@given(runs())
def test_what_it_makes_is_proved_and_takes_the_time_that_it_predicted(run: Run) -> None:
    problem, policy, costs, memory, recompute = run
    made = built(problem, policy)
    assert made is not None
    answer = joined(problem, made)
    assert length(problem, answer) <= length(problem, made)
    schedule, chain = schedule_of(problem, answer), chain_transfers(problem.num_stages)
    assert schedule.ranks == problem.ranks
    whole = add_communication(add_recompute(schedule, recompute), chain)
    verify(whole, chain, [memory] if memory else [])
    sizes = problem.num_stages, problem.num_microbatches
    assert (whole.num_stages, whole.num_microbatches) == sizes
    assert simulate(whole, costs).step_s == length(problem, answer)[0]


@given(runs())
def test_no_rank_keeps_more_than_it_may(run: Run) -> None:
    problem, policy, *_ = run
    answer = built(problem, policy)
    assert answer is not None
    for rank, program in enumerate(answer):
        begun = [0] * problem.num_stages
        assert fits(problem, rank, program)
        for result in map(problem.result.__getitem__, program):
            kind, stage = divmod(result // problem.num_microbatches, problem.num_stages)
            begun[stage] += (kind == FORWARD) - (kind == INPUT)
            assert not policy.ahead or begun[stage] <= policy.ahead[stage]


def schedule_by(
    policy: Policy, num_microbatches: int, costs: Costs, most_live: tuple[int, int]
) -> Schedule:
    memory = AtMostBytes(Sizes(kept_bytes=1), most_live)
    problem = problem_of(costs, memory, (0, 1), num_microbatches, ())
    answer = built(problem, policy)
    assert answer is not None
    return schedule_of(problem, joined(problem, answer))


def test_an_order_is_kept_and_weights_fill_its_gaps() -> None:
    orders = [[(b, stage, i) for i in range(2) for b in (False, True)] for stage in range(2)]
    policy = Policy(orders=orders)
    assert schedule_by(policy, 2, UNIT_COSTS, (1, 2)) == parse("""
        rank 0 | 0F0 0B0 0F1 0B1
        rank 1 | 1F0 1I0 1W0 1F1 1I1 1W1
    """)


def test_an_order_that_cannot_be_kept_makes_no_schedule() -> None:
    problem = problem_of(UNIT_COSTS, None, (0, 0), 1, ())
    assert built(problem, Policy(orders=[[(False, 1, 0), (False, 0, 0)]])) is None


def test_two_parts_stay_two_where_the_stage_before_waits_for_the_first() -> None:
    def made(transfer_s: int | Fraction) -> Schedule:
        return schedule_by(Policy(), 1, replace(UNIT_COSTS, transfer_s=transfer_s), (1, 1))

    assert made(0) == parse("rank 0 | 0F0 0B0\nrank 1 | 1F0 1I0 1W0")
    assert made(Fraction(1, 3)) == made(0)


def test_two_parts_stay_two_where_they_are_faster_than_one() -> None:
    costs = replace(UNIT_COSTS, backward_input_s=1, backward_weight_s=Fraction(1, 2))
    divided = parse("rank 0 | 0F0 0I0 0W0\nrank 1 | 1F0 1I0 1W0")
    assert schedule_by(Policy(), 1, costs, (1, 1)) == divided


def test_a_patient_rank_waits_for_what_comes_in_before_a_weights_part_would_end() -> None:
    costs = Costs(
        forward_s=(3, 1), backward_s=11, recompute_s=0, backward_input_s=1, backward_weight_s=10
    )
    first = parse("rank 0 | 0F0 0F1 0B0 0B1\nrank 1 | 1F0 1I0 1W0 1F1 1I1 1W1")
    later = parse("rank 0 | 0F0 0F1 0B0 0B1\nrank 1 | 1F0 1I0 1F1 1I1 1W0 1W1")
    for patience, expected in ((0, first), (1, later)):
        assert schedule_by(Policy(patience=patience), 2, costs, (2, 2)) == expected


def test_the_policy_of_the_shortest_step_is_chosen() -> None:
    policies = [Policy(whole=frozenset(stages)) for stages in ((0, 1), ())]
    whole, divided = (schedule_by(policy, 4, UNIT_COSTS, (2, 2)) for policy in policies)
    assert simulate(divided, UNIT_COSTS).step_s < simulate(whole, UNIT_COSTS).step_s
    assert best_of(policies, (0, 1), 4, None, 2) == divided


def test_costs_of_another_number_of_stages_are_refused() -> None:
    costs = Costs(forward_s=(1, 1, 1), backward_s=2, recompute_s=0)
    with pytest.raises(ConfigError, match="has 3 entries, the schedule has 2 stages"):
        best_of([Policy()], (0, 1), 4, costs, 1)
