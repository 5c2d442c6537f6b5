"""Tensors that share memory are found, at a cost that grows with their number only."""

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from penstock.runtime.stage.boundary import find_aliases

Views = Callable[[int], list[Tensor]]
APART: dict[str, Views] = {
    "tensors of their own": lambda n: [torch.zeros(3) for _ in range(n)],
    "rows": lambda n: list(torch.zeros(n, 3).unbind(0)),
}


@pytest.mark.parametrize("name", APART)
def test_views_that_share_no_byte_are_no_aliases(name: str) -> None:
    assert find_aliases({1: APART[name](40)}) == {}


@pytest.mark.parametrize("name", APART)
def test_twice_the_tensors_cost_about_twice_the_work(name: str) -> None:
    assert _calls(APART[name](80)) <= 2.5 * _calls(APART[name](40))


def test_of_many_tensors_the_two_that_overlap_are_found() -> None:
    base = torch.zeros(60, 4)
    rows = list(base.chunk(20))
    found = find_aliases({2: [torch.zeros(3), *rows], 1: [base[4:5]]})
    assert found == {2: frozenset({2}), 1: frozenset({0})}


def test_columns_of_the_same_rows_count_as_aliases() -> None:
    assert find_aliases({1: list(torch.zeros(4, 6).chunk(2, 1))}) == {1: frozenset({0, 1})}


def test_what_overlaps_with_an_alias_that_came_in_is_one_too() -> None:
    base = torch.zeros(6)
    assert find_aliases({1: [base[:3], base[3:]]}, known=[base[4:]]) == {1: frozenset({1})}


def test_two_views_of_other_strides_might_overlap() -> None:
    base = torch.zeros(4, 4)
    assert find_aliases({1: [base[:, 0], base.t()[2:]]}) == {1: frozenset({0, 1})}


def test_a_value_without_dimensions_is_an_alias_of_what_it_was_taken_from() -> None:
    base = torch.zeros(3)
    assert find_aliases({1: [base, base[0]]}) == {1: frozenset({0, 1})}


@pytest.mark.parametrize("seed", range(40))
def test_slices_of_one_matrix_that_share_a_value_are_aliases(seed: int) -> None:
    draw = random.Random(seed)
    rows, columns = draw.randint(2, 9), draw.randint(2, 9)
    base = torch.arange(rows * columns).view(rows, columns)
    slices = []
    for _ in range(draw.randint(2, 12)):
        top, left = draw.randrange(rows - 1), draw.randrange(columns)
        slices.append(base[top : top + draw.randint(2, 4), left : left + draw.randint(1, 3)])
    found = find_aliases({1: slices}).get(1, frozenset())
    values = [set(part.flatten().tolist()) for part in slices]
    times = Counter(value for part in values for value in part)
    assert found >= {n for n, part in enumerate(values) if any(times[v] > 1 for v in part)}


def _calls(tensors: list[Tensor]) -> int:
    with _Count() as count:
        find_aliases({1: tensors})
    return count.calls


class _Count(TorchFunctionMode):
    """Counts what is asked of tensors."""

    calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))
