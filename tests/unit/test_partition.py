"""Balanced cuts: the dynamic programme finds what trying every cut finds."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import PartitionError
from penstock.planner.partition import balance


def every_cut(num_layers: int, num_stages: int) -> list[tuple[int, ...]]:
    ends = combinations(range(1, num_layers), num_stages - 1)
    return [tuple(b - a for a, b in pairwise((0, *cut, num_layers))) for cut in ends]


def stage_costs(costs: list[int], partition: tuple[int, ...]) -> list[int]:
    ends = [sum(partition[:k]) for k in range(len(partition) + 1)]
    return [sum(costs[a:b]) for a, b in pairwise(ends)]


@given(st.data())
def test_the_slowest_stage_is_as_fast_as_can_be_and_ties_vary_least(data: st.DataObject) -> None:
    costs = data.draw(st.lists(st.integers(0, 20), min_size=1, max_size=8))
    num_stages = data.draw(st.integers(1, len(costs)))
    found = stage_costs(costs, balance(costs, num_stages))

    def rank(stages: list[int]) -> tuple[int, int]:
        return max(stages), sum(cost * cost for cost in stages)

    best = min(rank(stage_costs(costs, cut)) for cut in every_cut(len(costs), num_stages))
    assert rank(found) == best


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
