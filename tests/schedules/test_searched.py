"""Searched schedules: never longer than a named one, and within their limits."""

import pickle
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import pytest

from penstock.errors import ConfigError, ScheduleError
from penstock.planner.plan import Plan
from penstock.schedules import (
    ALL_SCHEDULES,
    AtMostBytes,
    Schedule,
    Sizes,
    gpipe,
    interleaved_1f1b,
    one_f_one_b,
    searched,
    zb_v,
)
from penstock.schedules.costs import Costs
from penstock.schedules.laws import SYNCHRONOUS, Law, verify
from penstock.schedules.lower import Lowering, Mode, lower
from penstock.schedules.memory import peak_bytes
from penstock.schedules.names import families_for
from penstock.schedules.passes import add_communication, add_recompute
from penstock.schedules.problem import answer_of, length, problem_of
from penstock.schedules.transfers import chain_transfers
from penstock.simulator import UNIT_COSTS, simulate
from tests.planner.plans import plan

SIZES = Sizes(kept_bytes=1)


def drawn_costs(random: Random, num_stages: int, least: int = 1) -> Costs:
    """Draw costs in which a whole backward takes about as long as its two parts."""

    def each() -> tuple[int, ...]:
        return tuple(random.randint(least, 10) for _ in range(num_stages))

    of_inputs, of_weights = each(), each()
    return Costs(
        forward_s=each(),
        backward_s=tuple(
            i + w + random.randint(-1, 1) for i, w in zip(of_inputs, of_weights, strict=True)
        ),
        recompute_s=each(),
        backward_input_s=of_inputs,
        backward_weight_s=of_weights,
        transfer_s=random.randint(0, 3),
        send_s=tuple(random.randint(0, 2) for _ in range(num_stages)),
        receive_s=random.randint(0, 2),
    )


def drawn_memory(random: Random, num_stages: int) -> AtMostBytes:
    """Draw a limit that each rank can keep to, and that hurts."""
    graphs = tuple(random.randint(5, 10) for _ in range(num_stages))
    sizes = Sizes(
        kept_bytes=graphs, input_bytes=random.randint(0, 5), weight_bytes=random.randint(0, 12)
    )
    return AtMostBytes(sizes, tuple(random.randint(10, 10 * num_stages) for _ in graphs))


def lowered(schedule: Schedule, recompute: tuple[int, ...] = ()) -> Schedule:
    """Add recomputes and messages as a pipeline does, and prove the result."""
    transfers = chain_transfers(schedule.num_stages)
    result = add_communication(add_recompute(schedule, recompute), transfers)
    verify(result, transfers)
    return result


@pytest.mark.parametrize("num_stages, num_microbatches", ((2, 5), (4, 8), (6, 3)))
def test_a_search_ends_never_later_than_a_named_family(num_stages, num_microbatches) -> None:
    random = Random(num_stages)
    for like in (one_f_one_b, interleaved_1f1b(2), zb_v()):
        costs = drawn_costs(random, num_stages)
        found = simulate(searched(costs, like=like)(num_stages, num_microbatches), costs)
        for family in families_for(costs, like.stages_per_rank):
            if family.ranks(num_stages) == like.ranks(num_stages):
                named = simulate(family(num_stages, num_microbatches), costs)
                assert found.step_s <= named.step_s, family


@pytest.mark.parametrize("seed", range(20))
def test_a_limit_is_proved_of_the_schedule_that_a_step_runs(seed: int) -> None:
    random = Random(seed)
    num_stages, m = random.randint(1, 4), random.randint(1, 5)
    memory = drawn_memory(random, num_stages)
    recompute = tuple(s for s in range(num_stages) if random.random() < 0.5)
    family = searched(drawn_costs(random, num_stages), memory, recompute=recompute)
    ranks, transfers = family.ranks(num_stages), chain_transfers(num_stages)
    for offload in ((), range(num_stages)):
        how = Lowering(
            family=family,
            ranks=ranks,
            transfers=transfers,
            recompute=frozenset(recompute),
            offload=frozenset(offload),
            posts=True,
        )
        for mode in Mode:
            lower(how, m, mode)


def test_a_limit_that_a_family_does_not_keep_to_is_refused_in_training_only() -> None:
    laws: tuple[Law, ...] = (*SYNCHRONOUS, AtMostBytes(SIZES, (4, 1)))
    how = Lowering(
        family=replace(one_f_one_b, laws=laws), ranks=(0, 1), transfers=chain_transfers(2)
    )
    for mode in Mode:  # the others run all forwards first, whatever the family does
        lower(how, 4, mode)
    gpipe_says_so = replace(how, family=replace(gpipe, laws=laws))
    for mode in (Mode.FORWARDS, Mode.BACKWARDS, Mode.EVAL):
        lower(gpipe_says_so, 4, mode)
    with pytest.raises(ScheduleError, match="its rank then keeps 2 bytes, 1 more than 1"):
        lower(gpipe_says_so, 4)


@pytest.mark.parametrize("num_stages, num_microbatches", ((2, 4), (3, 6), (4, 8), (8, 16)))
def test_no_rank_waits_between_its_first_and_its_last_instruction_with_the_memory_of_zb_h2(
    num_stages: int, num_microbatches: int
) -> None:
    memory = AtMostBytes(SIZES, 2 * num_stages - 1)
    schedule = searched(UNIT_COSTS, memory)(num_stages, num_microbatches)
    assert simulate(schedule, UNIT_COSTS).step_s == 3 * num_microbatches + num_stages - 1
    assert max(peak_bytes(schedule, SIZES)) <= 2 * num_stages - 1


@pytest.mark.parametrize(
    "weights, forward_s", (((10, 0), 1), ((0, 10, 4), 2), ((10, 0, 4), 2)), ids=str
)
def test_a_stage_of_ten_seconds_for_weights_and_one_of_none_beat_every_named_family(
    weights: tuple[int, ...], forward_s: int
) -> None:
    costs = Costs(
        forward_s=forward_s,
        backward_s=tuple(4 + seconds for seconds in weights),
        recompute_s=1,
        backward_input_s=4,
        backward_weight_s=weights,
    )
    found = simulate(searched(costs)(len(weights), 8), costs).step_s
    for family in families_for(costs, stages_per_rank=1):
        step_s = simulate(family(len(weights), 8), costs).step_s
        assert found < step_s or (found == step_s and family.name == "critical_path"), family


@pytest.mark.parametrize("num_drawn", (2, pytest.param(5, marks=pytest.mark.slow)))
@pytest.mark.parametrize("recompute", ((), pytest.param((0, 1, 2), marks=pytest.mark.slow), (1,)))
def test_the_search_prices_as_the_simulator_does(recompute, num_drawn) -> None:
    random = Random(3)
    for _ in range(num_drawn):
        exact = drawn_costs(random, 3)
        sevenths = tuple(float(x) / 7 for x in (1, 2, 3))
        rounded = replace(exact, forward_s=sevenths, transfer_s=0.1, send_s=0, receive_s=0)
        for costs in (exact, rounded):
            problem = problem_of(costs, None, (0, 1, 2), 3, recompute)
            for family in (*ALL_SCHEDULES, searched(costs, recompute=recompute)):
                schedule = family(3, 3)
                told = simulate(lowered(schedule, recompute), costs).step_s
                assert length(problem, answer_of(problem, schedule))[0] == told


def test_ranks_keep_to_their_limits_with_recomputes_and_several_stages() -> None:
    random = Random(5)
    for like, num_stages in ((one_f_one_b, 4), (interleaved_1f1b(2), 6)):
        costs = drawn_costs(random, num_stages)
        sizes = Sizes(kept_bytes=10, input_bytes=1, weight_bytes=12)
        memory = AtMostBytes(sizes, 25)
        recompute = tuple(range(0, num_stages, 2))
        schedule = searched(costs, memory, like, recompute)(num_stages, 7)
        transfers = chain_transfers(num_stages)
        verify(lowered(schedule, recompute), transfers, [memory])


def test_a_searched_family_is_a_value_that_a_plan_keeps_in_its_file() -> None:
    costs = Costs(forward_s=(1, 2.5), backward_s=3, recompute_s=1, transfer_s={(0, 1): 0.5})
    for family in (searched(costs), searched(costs, AtMostBytes(SIZES, (2, 1)))):
        assert pickle.loads(pickle.dumps(family)) == family
        given = plan(1, 1, schedule=family)
        assert Plan.from_json(given.to_json()) == given
        names = (Costs, AtMostBytes, Sizes, searched, *ALL_SCHEDULES)
        known = {getattr(x, "__name__", str(x)): x for x in names}
        assert eval(repr(family), known) == family
    assert searched(costs)(2, 3) is searched(costs)(2, 3)


def test_a_limit_that_no_schedule_keeps_to_is_refused_with_the_least_that_would_do() -> None:
    memory = AtMostBytes(Sizes(kept_bytes=(400, 1000, 400)), 900)
    with pytest.raises(ConfigError, match=r"rank 1: it needs 1,000 bytes .* 100 more than .*=900"):
        searched(UNIT_COSTS, memory)(3, 4)
    assert searched(UNIT_COSTS, replace(memory, limit_bytes=(900, 1000, 900)))(3, 4)
    looped = partial(searched, UNIT_COSTS, like=interleaved_1f1b(2))
    with pytest.raises(ConfigError, match=r"rank 0: it needs 800 bytes .* 100 more"):
        looped(AtMostBytes(Sizes(kept_bytes=400), 700))(4, 4)
    assert looped(AtMostBytes(Sizes(kept_bytes=400), 800))(4, 4)


priced, EDGES = partial(replace, UNIT_COSTS), [(0, 1), (1, 2), (2, 3)]


@pytest.mark.parametrize(
    ("how", "message"),
    (
        ({"costs": priced(forward_s=(1, 2))}, "forward_s has 2 entries, .* 3 stages"),
        ({"costs": priced(transfer_s={(0, 1): 1})}, r"no entry for edge \(1, 2\)"),
        (
            {"costs": priced(transfer_s=dict.fromkeys(EDGES, 1))},
            "names stage 3, and the 3 stages",
        ),
        ({"memory": AtMostBytes(SIZES, (4, 4))}, "limit_bytes has 2 entries"),
        (
            {"memory": AtMostBytes(Sizes(kept_bytes=(1, 1)), 4)},
            "kept_bytes has 2 entries, the",
        ),
        ({"memory": 4}, "memory=4 is no limit of bytes: write AtMostBytes"),
        ({"recompute": (3,)}, "recompute names stage 3"),
    ),
)
def test_costs_and_limits_of_another_size_or_kind_are_refused(how: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        searched(**{"costs": UNIT_COSTS, **how})(3, 4)


def test_the_drawn_schedule_is_what_a_search_gives() -> None:
    drawn = [line.strip() for line in (searched.__doc__ or "").splitlines()]
    assert [line for line in drawn if line.startswith("rank")] == str(
        searched(UNIT_COSTS)(3, 4)
    ).splitlines()
