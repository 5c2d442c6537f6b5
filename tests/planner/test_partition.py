"""Balanced cuts: the dynamic programme finds what trying every cut finds."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import PartitionError
from penstock.planner.partition import balance, balance_stages


def every_cut(num_layers: int, num_stages: int) -> list[tuple[int, ...]]:
    ends = combinations(range(1, num_layers), num_stages - 1)
    return [tuple(b - a for a, b in pairwise((0, *cut, num_layers))) for cut in ends]


def rank(costs: list[list[int]], partition: tuple[int, ...]) -> tuple[int, int]:
    """Give what partitions are compared by: the slowest stage, then how much stages vary."""
    ends = [sum(partition[:k]) for k in range(len(partition) + 1)]
    rows = zip(costs, pairwise(ends), strict=True)
    stages = [sum(on_stage[a:b]) for on_stage, (a, b) in rows]
    return max(stages), sum(cost * cost for cost in stages)


@given(st.data())
def test_the_slowest_stage_is_as_fast_as_can_be_and_ties_vary_least(data: st.DataObject) -> None:
    num_layers = data.draw(st.integers(1, 8))
    num_stages = data.draw(st.integers(1, num_layers))
    cost = st.integers(0, 20)
    layers = st.lists(cost, min_size=num_layers, max_size=num_layers)
    costs = data.draw(st.lists(layers, min_size=num_stages, max_size=num_stages))
    best = min(rank(costs, cut) for cut in every_cut(num_layers, num_stages))
    assert rank(costs, balance_stages(costs)) == best


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
