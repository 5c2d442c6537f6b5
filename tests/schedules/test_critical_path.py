"""List schedules by critical paths: on any ranks, within a limit, as good as named ones."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.schedules import AtMostBytes, Costs, Sizes, critical_path, zb_h1
from penstock.schedules.costs import UNIT_COSTS
from penstock.schedules.lower import Lowering, lower
from penstock.schedules.memory import peak_bytes
from penstock.schedules.names import families_for
from penstock.schedules.problem import lower_bound, problem_of
from penstock.schedules.transfers import chain_transfers
from penstock.simulator import simulate

COUNTS = Sizes(kept_bytes=1)


@st.composite
def placements(draw: st.DrawFn) -> tuple[int, ...]:
    num_ranks = draw(st.integers(1, 4))
    more = draw(st.lists(st.integers(0, num_ranks - 1), max_size=4))
    return tuple(draw(st.permutations([*range(num_ranks), *more])))


def drawn_costs(seed: int, num_stages: int) -> Costs:
    random = Random(seed)
    forward, of_inputs, of_weights = (
        tuple(random.randint(1, 9) for _ in range(num_stages)) for _ in range(3)
    )
    return Costs(
        forward_s=forward,
        backward_s=tuple(a + b for a, b in zip(of_inputs, of_weights, strict=True)),
        backward_input_s=of_inputs,
        backward_weight_s=of_weights,
        transfer_s=random.choice((0, 1, 5)),
    )


@given(placements(), st.integers(1, 6), st.integers(0, 99), st.integers(0, 3))
def test_any_placement_under_any_limit_gives_a_schedule_that_is_proved(
    ranks: tuple[int, ...], m: int, seed: int, more: int
) -> None:
    costs = drawn_costs(seed, len(ranks))
    memory = AtMostBytes(COUNTS, tuple(ranks.count(r) + more for r in range(1 + max(ranks))))
    for family in (critical_path(costs, ranks), critical_path(costs, ranks, memory)):
        schedule = family(len(ranks), m)
        assert schedule.ranks == family.ranks(len(ranks)) == ranks
        lower(Lowering(family=family, ranks=ranks, transfers=chain_transfers(len(ranks))), m)
        bound = lower_bound(problem_of(costs, None, ranks, m, ()))
        assert simulate(schedule, costs).step_s >= bound
    assert memory in family.laws
    limits = memory.limits(1 + max(ranks))
    assert all(map(int.__le__, peak_bytes(schedule, COUNTS), limits))


@pytest.mark.parametrize("seed", range(20))
def test_one_stage_on_a_rank_is_as_fast_as_any_named_schedule(seed: int) -> None:
    costs = drawn_costs(seed, 4)
    steps_s = {f.name: simulate(f(4, 8), costs).step_s for f in families_for(costs, 1)}
    assert steps_s["critical_path"] <= min(steps_s.values())


def test_stages_that_are_alike_run_as_zb_h1_and_keep_as_little() -> None:
    for m in (1, 3, 4, 9):
        listed, named = critical_path()(4, m), zb_h1()(4, m)
        assert simulate(listed, UNIT_COSTS).step_s == simulate(named, UNIT_COSTS).step_s
        assert peak_bytes(listed, COUNTS) == peak_bytes(named, COUNTS)


@pytest.mark.parametrize(
    "make, words",
    (
        (lambda: critical_path(None, (0, 2)), "each rank from 0 up at least once"),
        (lambda: critical_path(None, [0, 1]), "as a tuple"),  # type: ignore[arg-type]
        (lambda: critical_path(None, ()), "as a tuple"),
        (lambda: critical_path(None, (0, 1), 4), "memory=4 is no limit of bytes"),  # type: ignore[arg-type]
        (lambda: critical_path(ranks=(0, 1, 0)).ranks(4), "is for 3 stages, and there are 4"),
        (lambda: critical_path(None, (0, 0), AtMostBytes(COUNTS, 1))(2, 4), "the limit of rank 0"),
    ),
)
def test_placements_and_limits_that_cannot_be_are_refused(make, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()
