"""Balanced cuts: the dynamic programme finds what trying every cut finds."""

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, pairwise, permutations
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.gpipe_paper.cuts import lingvo_cut
from penstock.errors import PartitionError
from penstock.planner.cuts import (
    Setting,
    balance,
    cut_over_devices,
    cuts,
    each_layer,
    sums,
    windows,
)
from penstock.planner.stage_program import Matrix

Costs = Callable[[Setting], Matrix]
Spans = Sequence[tuple[int, int]]
NO_CUT = (inf, inf)


def every_cut(spans: Spans, num_stages: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Yield the (start, end) of each stage, for every cut between spans."""
    for ends in combinations([start for start, _ in spans[1:]], num_stages - 1):
        yield tuple(pairwise((0, *ends, spans[-1][1])))


def score(costs: Sequence[float]) -> tuple[float, float]:
    """Return what cuts are compared by: the slowest stage, then how much stages vary."""
    return (max(costs), sum(cost * cost for cost in costs)) if max(costs) < inf else NO_CUT


def step_s(costs: Sequence[float], num_microbatches: int) -> float:
    """Return the seconds of a step by Alpa's formula."""
    return sum(costs) + (num_microbatches - 1) * max(costs)


def drawn_costs(seed: int, num_layers: int, values: int, share_of_inf: float) -> Costs:
    """Return whole costs that are sums of nothing, a table for each setting."""
    known: dict[Setting, Matrix] = {}
    random = np.random.default_rng(seed)

    def cost(setting: Setting) -> Matrix:
        if setting not in known:
            shape = (num_layers + 1,) * 2
            table = random.integers(0, values, shape).astype(float)
            table[random.random(shape) < share_of_inf] = inf
            known[setting] = table
        return known[setting]

    return cost


@st.composite
def drawn_spans(draw: st.DrawFn) -> Spans:
    widths = draw(st.lists(st.integers(1, 3), min_size=1, max_size=8))
    ends = np.cumsum(widths).tolist()
    return list(pairwise((0, *ends)))


SEEDS = st.integers(0, 2**32)
FEW_OR_MANY = st.sampled_from((2, 4, 1000))
INFINITE = st.sampled_from((0.0, 0.2, 0.6))


@pytest.mark.parametrize("num_drawn", (300, pytest.param(1500, marks=pytest.mark.slow)))
def test_any_cost_is_cut_as_trying_every_cut_finds(num_drawn: int) -> None:
    drawn = given(drawn_spans(), st.data(), SEEDS, FEW_OR_MANY, INFINITE)
    settings(max_examples=num_drawn, deadline=None)(drawn(check_cut))()


def check_cut(
    spans: Spans, data: st.DataObject, seed: int, values: int, share_of_inf: float
) -> None:
    num_stages = data.draw(st.integers(1, len(spans)))
    cost = drawn_costs(seed, spans[-1][1], values, share_of_inf)

    def costs_of(bounds: Sequence[tuple[int, int]]) -> list[float]:
        return [float(cost(Setting(k))[a, b]) for k, (a, b) in enumerate(bounds)]

    every = {bounds: costs_of(bounds) for bounds in every_cut(spans, num_stages)}
    best = min(map(score, every.values()))
    for number in (inf, 1, *data.draw(st.lists(st.integers(2, 64), max_size=2))):
        made = cuts(num_stages, lambda k: cost(Setting(k)), spans, num_microbatches=number)
        if not made:
            assert best == NO_CUT
            return
        sizes = made[0]
        costs = every[tuple(pairwise(np.cumsum((0, *sizes)).tolist()))]
        if number in (1, inf):
            assert score(costs) == best < NO_CUT
        else:
            least_s = min(step_s(own, int(number)) for own in every.values())
            assert step_s(costs, int(number)) <= least_s * 1.0011 + 1e-9


@settings(max_examples=250, deadline=None)
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=3).filter(any),
    st.data(),
    SEEDS,
    FEW_OR_MANY,
    INFINITE,
)
def test_devices_are_ordered_as_trying_every_order_finds(
    counts: list[int], data: st.DataObject, seed: int, values: int, share_of_inf: float
) -> None:
    num_stages = data.draw(st.integers(1, min(4, sum(counts))))
    num_layers = data.draw(st.integers(num_stages, 6))
    spans = each_layer(num_layers)
    cost = drawn_costs(seed, num_layers, values, share_of_inf)
    devices = [kind for kind, count in enumerate(counts) for _ in range(count)]

    def costs_of(kinds: Sequence[int], bounds: Sequence[tuple[int, int]]) -> list[float]:
        placed = enumerate(zip(kinds, bounds, strict=True))
        return [float(cost(Setting(k, kind))[a, b]) for k, (kind, (a, b)) in placed]

    orders, borders = set(permutations(devices, num_stages)), [*every_cut(spans, num_stages)]
    every = {(kinds, bounds): costs_of(kinds, bounds) for kinds in orders for bounds in borders}
    for number in (inf, 3):
        found = cut_over_devices(counts, num_stages, cost, spans, number)
        best = min(map(score, every.values()))
        if found is None:
            assert best == NO_CUT
            return
        costs = every[found.kinds, tuple(pairwise(np.cumsum((0, *found.partition)).tolist()))]
        if number == inf:
            assert score(costs) == best < NO_CUT
        else:
            assert step_s(costs, 3) <= min(step_s(own, 3) for own in every.values()) * 1.0011


@settings(max_examples=250, deadline=None)
@given(drawn_spans(), st.data(), SEEDS, st.integers(5, 30))
def test_what_cannot_fit_is_left_out_of_what_is_searched_and_no_cut_is_another(
    spans: Spans, data: st.DataObject, seed: int, room: int
) -> None:
    num_layers, num_stages = spans[-1][1], data.draw(st.integers(1, len(spans)))
    random = np.random.default_rng(seed)
    amounts = random.integers(0, 10, num_layers).tolist()
    limits = random.integers(0, room, num_stages).tolist()
    costs = drawn_costs(seed, num_layers, 4, 0.1)

    def cost(stage: int) -> Matrix:
        return np.where(sums(amounts) <= limits[stage], costs(Setting(stage)), inf)

    found = windows(amounts, limits, [0, *(end for _, end in spans)])
    whole = cuts(num_stages, cost, spans)
    if found is None:
        assert not whole
    else:
        assert cuts(num_stages, lambda n: cost(n)[found[n]], spans, found) == whole


def test_a_long_chain_is_looked_at_only_where_it_may_be_cut() -> None:
    found = windows([3.0] * 1666, [3.0 * 14] * 128, range(1667))
    assert found is not None
    assert max(each.starts.stop - each.starts.start for each in found) < 128
    assert windows([3.0] * 1666, [3.0 * 13] * 128, range(1667)) is None


def test_starts_beyond_those_looked_at_together_are_found() -> None:
    """The shortest chains that fill several rows of what is looked at together."""
    costs = [float(n % 7 + 1) for n in range(150)]
    for num_stages in (2, 3):
        every = every_cut(each_layer(150), num_stages)
        best = min(score([sum(costs[a:b]) for a, b in bounds]) for bounds in every)
        sizes = balance(costs, num_stages)
        bounds = pairwise(np.cumsum((0, *sizes)).tolist())
        assert score([sum(costs[a:b]) for a, b in bounds]) == best


def test_stages_that_rounding_tells_apart_are_equally_slow() -> None:
    """0.1 + 0.2 is a little more than 0.3, and the cut with it has less to do elsewhere."""
    table = np.array([[inf, 0.3, 0.1 + 0.2, inf], [inf] * 4, [inf] * 4, [inf] * 4])
    table[1, 3], table[2, 3] = 0.3, 0.1
    assert cuts(2, lambda stage: table, each_layer(3)) == [(2, 1)]


def test_a_device_that_is_half_as_fast_gets_the_place_where_that_costs_least() -> None:
    heavy = np.array([1.0, 1.0, 6.0, 1.0, 1.0, 1.0])
    before = np.array([0.0, *heavy.cumsum()])
    table = before - before[:, None]
    found = cut_over_devices((2, 1), 3, lambda at: table * (1 + at.kind), each_layer(6))
    assert found is not None
    assert (found.partition, found.kinds) == ((2, 1, 3), (1, 0, 0))


def test_where_nothing_fits_there_is_no_cut() -> None:
    nothing = np.full((5, 5), inf)
    assert not cuts(2, lambda stage: nothing, each_layer(4))
    assert cut_over_devices((1, 1), 2, lambda at: nothing, each_layer(4)) is None


def test_layers_of_one_cost_are_shared_evenly() -> None:
    assert balance([1.0] * 8, 4) == (2, 2, 2, 2)
    assert balance([1, 1, 1, 3, 3], 3) == (3, 1, 1)


def test_a_layer_without_cost_still_belongs_to_a_stage() -> None:
    assert sum(balance([0, 0, 5, 0], 3)) == 4
    assert min(balance([0, 0, 5, 0], 3)) == 1


@pytest.mark.parametrize("num_stages", (0, 4))
def test_more_stages_than_layers_are_refused(num_stages: int) -> None:
    with pytest.raises(PartitionError, match=f"num_stages={num_stages}, but"):
        balance([1, 1, 1], num_stages)


def test_more_stages_than_devices_are_refused() -> None:
    with pytest.raises(PartitionError, match="3 stages need a device each, and there are 2"):
        cut_over_devices((1, 1), 3, lambda at: np.zeros((5, 5)), each_layer(4))


def test_the_papers_code_puts_a_layer_across_a_boundary_later_and_may_leave_stages_empty() -> None:
    assert lingvo_cut([1, 1, 1, 3, 3], 3) == (2, 1, 2)
    assert lingvo_cut([1, 1, 1, 1], 2) == (1, 3)
    assert lingvo_cut([10, 1, 1], 4) == (0, 0, 0, 3)
    with pytest.raises(PartitionError, match=r"cost 0\.0 together"):
        lingvo_cut([0.0, 0.0], 2)


@pytest.mark.parametrize("num_layers", (100, 1000))
def test_a_long_chain_is_cut_into_64_stages_as_no_shift_of_an_end_betters(num_layers: int) -> None:
    costs = np.random.default_rng(0).random(num_layers).tolist()
    sizes = balance(costs, 64)
    ends = np.cumsum((0, *sizes)).tolist()
    found = score([sum(costs[a:b]) for a, b in pairwise(ends)])
    for k in range(1, 64):
        for shift in (-1, 1):
            moved = sorted({*ends[:k], ends[k] + shift, *ends[k + 1 :]})
            if len(moved) == 65:
                other = score([sum(costs[a:b]) for a, b in pairwise(moved)])
                assert other[0] > found[0] or other[1] >= found[1] * (1 - 1e-9)
