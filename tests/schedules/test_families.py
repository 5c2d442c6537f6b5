"""What is published of the families: how long a step is, what ranks keep, how the grid looks."""

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import accumulate, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.schedules import (
    Family,
    Forward,
    Schedule,
    breadth_first,
    critical_path,
    dualpipe_v,
    eager_1f1b,
    gpipe,
    interleaved_1f1b,
    ir,
    one_f_one_b,
    parse,
    v_half,
    v_min,
    wave,
    zb_h1,
    zb_h2,
    zb_v,
)
from penstock.schedules.costs import PerStage
from penstock.schedules.family import zigzag
from penstock.schedules.laws import verify
from penstock.schedules.names import (
    ASYNCHRONOUS_SCHEDULES,
    SCHEDULE_NAMES,
    SYNCHRONOUS_FAMILIES,
    Maker,
    argument_types,
    by_default,
    named_schedule,
)
from penstock.schedules.passes import add_communication
from penstock.schedules.transfers import chain_transfers
from penstock.schedules.walk import walk
from penstock.simulator import UNIT_COSTS, Costs, simulate

F = 1
"""Seconds of a forward, and of each part of a backward, under unit costs."""
BY_DEFAULT = tuple(map(by_default, SYNCHRONOUS_FAMILIES))
FAMILIES = (
    *(f for f in BY_DEFAULT if "stages_per_rank" not in argument_types(f.name)),
    *(
        make(stages_per_rank)
        for make in (interleaved_1f1b, breadth_first, wave)
        for stages_per_rank in (1, 2, 3)
    ),
)
ON_A_V = (zb_v(), v_half(), v_min())
SIZES = list(product((1, 2, 3, 4, 5, 8), (1, 2, 3, 5, 8, 11, 13, 16)))
"""Numbers of ranks and of micro-batches: fewer and more of them, and multiples and others."""
MORE_RANKS, MORE_MICROBATCHES = st.integers(9, 16), st.integers(1, 48)


@cache
def made(family: Family, num_ranks: int, num_microbatches: int) -> Schedule:
    return family(num_ranks * family.stages_per_rank, num_microbatches)


@cache
def step(family: Family, num_ranks: int, num_microbatches: int) -> int:
    """Give the seconds of a step under unit costs, which are whole numbers of them."""
    seconds = simulate(made(family, num_ranks, num_microbatches), UNIT_COSTS).step_s
    assert seconds == int(seconds)
    return int(seconds)


def most_kept(schedule: Schedule) -> int:
    """Give the most forwards on a rank whose backward, or its weights' part, is still to come."""
    return max(
        live
        for program in schedule.programs
        for live in accumulate(
            isinstance(x, Forward) - isinstance(x, ir.ADDS_GRADIENTS) for x in program
        )
    )


def idle(schedule: Schedule) -> Iterator[float]:
    """Give the seconds that each rank waits between its first instruction and its last."""
    spans = simulate(schedule, UNIT_COSTS).spans
    for rank in range(schedule.num_ranks):
        ran = [x for x in spans if x.rank == rank and isinstance(x.instruction, ir.Compute)]
        yield ran[-1].end_s - ran[0].start_s - sum(x.duration_s for x in ran)


def check_laws(family: Family, num_ranks: int, num_microbatches: int) -> None:
    """See that a schedule is complete and ends, and runs as predicted."""
    schedule = made(family, num_ranks, num_microbatches)
    chain = chain_transfers(schedule.num_stages)
    lowered = add_communication(schedule, chain)
    verify(lowered, chain, family.laws)
    assert (schedule.num_ranks, lowered.num_microbatches) == (num_ranks, num_microbatches)
    assert schedule.ranks == family.ranks(schedule.num_stages)
    executed: list[list[ir.Instruction]] = [[] for _ in schedule.programs]
    for rank, instruction in walk(lowered):
        executed[rank].append(instruction)
    assert simulate(schedule, UNIT_COSTS).schedule == lowered
    assert tuple(map(tuple, executed)) == lowered.programs


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_every_size_is_complete_and_ends_and_runs_in_the_order_that_was_predicted(family) -> None:
    for num_ranks, num_microbatches in SIZES:
        if num_ranks * family.stages_per_rank <= 8:
            check_laws(family, num_ranks, num_microbatches)


@settings(max_examples=12)
@given(st.sampled_from(FAMILIES), MORE_RANKS, MORE_MICROBATCHES)
def test_so_is_a_larger_one(family: Family, num_ranks: int, num_microbatches: int) -> None:
    check_laws(family, num_ranks, num_microbatches)


StepOf = Callable[[int, int, int], int]
"""(R ranks, m micro-batches, v stages on a rank) -> F that a step takes."""
CLOSED_FORMS: list[tuple[Family, StepOf, StepOf]] = [
    # family, from how many micro-batches on, seconds of a step
    *((f, lambda R, m, v: 1, lambda R, m, v: 3 * (m + R - 1)) for f in (gpipe, one_f_one_b)),
    (eager_1f1b, lambda R, m, v: 1, lambda R, m, v: 3 * (m + R - 1)),
    (zb_h1(), lambda R, m, v: 1, lambda R, m, v: 2 * m + max(m, R) + R - 1),
    (zb_h2(), lambda R, m, v: 1, lambda R, m, v: 2 * m + max(m, R) + R - 1),
    (critical_path(), lambda R, m, v: 1, lambda R, m, v: 2 * m + max(m, R) + R - 1),
    *(
        (
            breadth_first(v),
            lambda R, m, v: 1,
            lambda R, m, v: 3 * ((v - 1) * max(m, R) + m + R - 1),
        )
        for v in (1, 2, 3)
    ),
    *((wave(v), lambda R, m, v: 2 * R, lambda R, m, v: 3 * (v * m + R - 1)) for v in (1, 2)),
    (zb_v(), lambda R, m, v: R, lambda R, m, v: 6 * m + R - 1),
    (dualpipe_v, lambda R, m, v: 2 * R, lambda R, m, v: 6 * m + R - 1),
]


@pytest.mark.parametrize(
    "family, since, expected", CLOSED_FORMS, ids=[str(family) for family, _, _ in CLOSED_FORMS]
)
def test_the_bubble_is_what_is_published(family: Family, since: StepOf, expected: StepOf) -> None:
    v, checked = family.stages_per_rank, 0
    for num_ranks, m in SIZES:
        if m >= since(num_ranks, m, v):
            assert step(family, num_ranks, m) == expected(num_ranks, m, v), (num_ranks, m)
            checked += 1
    assert checked >= len(SIZES) // 2


@pytest.mark.parametrize("family", (zb_h2(), zb_v()), ids=str)
def test_no_rank_waits_between_its_first_instruction_and_its_last(family: Family) -> None:
    for num_ranks, m in SIZES:
        if m >= 2 * num_ranks - 1:
            assert not any(idle(made(family, num_ranks, m))), (num_ranks, m)


@pytest.mark.parametrize("v", (1, 2, 3, 4))
def test_waves_are_never_longer_than_1f1b_and_hardly_longer_than_interleaved_ones(v: int) -> None:
    for num_ranks, m in SIZES:
        step_s = step(wave(v), num_ranks, m)
        assert step_s <= v * step(one_f_one_b, num_ranks, m)
        assert m < 2 * num_ranks or 10 * step_s <= 11 * 3 * (v * m + num_ranks - 1)


@pytest.mark.parametrize(
    "family, most",
    (
        (zb_h1(), lambda R: R),
        (zb_h2(), lambda R: 2 * R - 1),
        (zb_v(), lambda R: 2 * R),
        (v_half(), lambda R: R + 2 - R % 2),
        (v_min(), lambda R: 2 * (R + 4) // 3),
        (dualpipe_v, lambda R: 2 * R + 1),
        (wave(2), lambda R: 3 * R),
        (wave(3), lambda R: 4 * R),
    ),
    ids=lambda given: str(given) if isinstance(given, Family) else "its bound",
)
def test_no_rank_keeps_more_than_is_published(family: Family, most: Callable[[int], int]) -> None:
    for num_ranks, m in SIZES:
        kept = most_kept(made(family, num_ranks, m))
        assert kept <= max(most(num_ranks), family.stages_per_rank), (num_ranks, m)
        whole = m >= 2 * num_ranks + 1 and family not in (v_min(), wave(3))
        assert not whole or kept == most(num_ranks), (num_ranks, m)


def test_less_memory_costs_at_most_so_much_time() -> None:
    for num_ranks, m in SIZES:
        if m >= num_ranks > 1:
            assert step(v_half(), num_ranks, m) <= 6 * m + 3 * num_ranks - 3
            assert step(v_min(), num_ranks, m) <= 6 * m + 4 * num_ranks - 3
            assert step(zb_v(), num_ranks, m) <= step(v_half(), num_ranks, m)


SECONDS = st.integers(1, 9)


@st.composite
def unequal_costs(draw: st.DrawFn, num_stages: int) -> Costs:
    each = st.tuples(*[SECONDS] * num_stages)
    forwards, inputs, weights = draw(each), draw(each), draw(each)
    return Costs(
        forward_s=forwards,
        backward_s=tuple(i + w for i, w in zip(inputs, weights, strict=True)),
        recompute_s=0,
        transfer_s=draw(st.integers(0, 2)),
        send_s=draw(each),
        receive_s=draw(st.integers(0, 2)),
        backward_input_s=inputs,
        backward_weight_s=weights,
    )


@settings(max_examples=40)
@given(st.data(), st.integers(1, 6), st.integers(1, 12))
def test_zb_h1_and_zb_h2_are_filled_for_any_costs_and_never_longer_than_1f1b(
    data: st.DataObject, num_stages: int, m: int
) -> None:
    costs = data.draw(unequal_costs(num_stages))
    h2, h1, plain = (
        simulate(family(num_stages, m), costs).step_s
        for family in (zb_h2(costs), zb_h1(costs), one_f_one_b)
    )
    assert h2 <= h1 <= plain


@settings(max_examples=40)
@given(st.data(), st.integers(1, 6), st.integers(1, 14))
def test_zb_v_is_never_longer_than_1f1b_of_what_each_rank_runs_as_one_stage(
    data: st.DataObject, num_ranks: int, m: int
) -> None:
    costs = replace(data.draw(unequal_costs(2 * num_ranks)), transfer_s=0, send_s=0, receive_s=0)

    def of_ranks(seconds: PerStage) -> PerStage:
        assert isinstance(seconds, tuple)
        both = list(zip(seconds, reversed(seconds), strict=True))
        return tuple(there + back for there, back in both[:num_ranks])

    whole = Costs(forward_s=of_ranks(costs.forward_s), backward_s=of_ranks(costs.backward_s))
    plain_s = simulate(one_f_one_b(num_ranks, m), whole).step_s
    assert simulate(zb_v(costs)(2 * num_ranks, m), costs).step_s <= plain_s


@settings(max_examples=40)
@given(st.sampled_from((zb_v, v_half, v_min)), st.data(), st.integers(1, 4), st.integers(1, 12))
def test_on_a_v_any_costs_can_be_run_within_the_same_memory(make, data, num_ranks, m) -> None:
    schedule = make(data.draw(unequal_costs(2 * num_ranks)))(2 * num_ranks, m)
    chain = chain_transfers(2 * num_ranks)
    verify(add_communication(schedule, chain), chain)
    most = 2 * num_ranks, num_ranks + 2, 2 * (num_ranks + 4) // 3
    assert most_kept(schedule) <= most[(zb_v, v_half, v_min).index(make)]


def test_a_long_weights_part_on_one_stage_is_filled_around() -> None:
    costs = Costs(
        forward_s=1,
        backward_s=(2, 11, 1, 1),
        recompute_s=0,
        backward_input_s=1,
        backward_weight_s=(1, 10, 0, 0),
    )
    steps_s = [simulate(f(4, 8), costs).step_s for f in (zb_h1(costs), one_f_one_b)]
    before_s, until_the_first_gradient_s = 1, 1  # after the four forwards that it may keep
    assert steps_s[0] == before_s + until_the_first_gradient_s + 8 * (1 + 1 + 10)
    assert steps_s[0] < steps_s[1]


def test_costs_are_those_of_the_stages() -> None:
    costs = Costs(forward_s=(1, 1, 1), backward_s=2, recompute_s=0)
    for make in (zb_h1, zb_h2, zb_v, v_half, v_min):
        with pytest.raises(ConfigError, match="has 3 entries, the schedule has 4 stages"):
            make(costs)(4, 2)


@pytest.mark.parametrize("given_family", SYNCHRONOUS_FAMILIES, ids=lambda f: by_default(f).name)
def test_the_grid_in_the_docstring_is_what_is_made(given_family: Family | Maker) -> None:
    family = by_default(given_family)
    text = inspect.getdoc(family.build if given_family is family else given_family) or ""
    size = re.search(r"p = (\d+).*?m = (\d+)", text, re.DOTALL)
    assert size is not None
    num_stages, m = map(int, size.groups())
    drawn = [line.partition("|")[2] for line in text.splitlines() if re.search(r" \d+ +\|", line)]
    schedule = family(num_stages, m)
    expected = [" ".join(map(str, program)) for program in schedule.programs]
    if re.match(r"\s*[FB]", drawn[0]):  # one stage a rank: it is named at the line's start only
        expected = [re.sub(r"\b\d+([FB])", r"\1", line) for line in expected]
    assert [" ".join(line.split()) for line in drawn] == expected


def test_stages_are_dealt_out_there_and_back() -> None:
    assert zigzag(8, 2) == (0, 1, 1, 0, 0, 1, 1, 0)
    assert zb_v().ranks(6) == (0, 1, 2, 2, 1, 0)
    assert wave(3).ranks(6) == (0, 1, 1, 0, 0, 1)


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_a_name_and_the_stages_on_a_rank_give_a_family(name: str) -> None:
    families = (*BY_DEFAULT, *ASYNCHRONOUS_SCHEDULES)
    per_rank = next(f for f in families if f.name == name).stages_per_rank
    assert named_schedule(name, 4, per_rank).stages_per_rank == per_rank
    if "stages_per_rank" in argument_types(name):
        assert named_schedule(name, 6, 3).stages_per_rank == 3
    with pytest.raises(ConfigError, match="on each rank, and stages per rank is"):
        named_schedule(name, 4, 1 if per_rank > 1 else 2)


def test_a_v_of_another_number_of_stages_is_refused_with_what_to_choose() -> None:
    with pytest.raises(ConfigError, match=r"2 stages on each rank, .* 3; make it 2$"):
        named_schedule("zb_v", 6, 3)
    with pytest.raises(ConfigError, match="choose 4 or 6 stages"):
        zb_v()(5, 2)


def test_a_single_rank_runs_breadth_first_alone() -> None:
    assert breadth_first(2)(2, 2) == parse("rank 0 | 0F0 0F1 1F0 1F1 1B0 1B1 0B0 0B1")
