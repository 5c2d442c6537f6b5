"""Numbers that hold for some runs of layers, added up for one of them, or for every one.

A run is [start, end); a rectangle is an amount that counts for every run whose start is from
`first_start` to `last_start`, and whose end is from `first_end` to `last_end`, all included.
"""

from collections.abc import Iterable
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Rectangle(NamedTuple):
    """An amount, and the runs that it counts for."""

    first_start: int
    last_start: int
    first_end: int
    last_end: int
    amount: int


class Rectangles:
    """Amounts for the runs of `num_layers` layers."""

    def __init__(self, num_layers: int, found: Iterable[Rectangle]) -> None:
        self._size = num_layers + 1
        self._found = np.array([*found], dtype=np.int64).reshape(-1, 5).T

    def __call__(self, start: int, end: int) -> int:
        """Return what counts for layers [start, end)."""
        from_start, to_start, from_end, to_end, amounts = self._found
        has_start = (from_start <= start) & (start <= to_start)
        return int(amounts[has_start & (from_end <= end) & (end <= to_end)].sum())

    @cached_property
    def table(self) -> NDArray[np.int64]:
        """All of it, [start, end]: made once, of corners that are summed up."""
        from_start, to_start, from_end, to_end, amounts = self._found
        corners = np.zeros((self._size + 1, self._size + 1), dtype=np.int64)
        np.add.at(corners, (from_start, from_end), amounts)
        np.add.at(corners, (to_start + 1, to_end + 1), amounts)
        np.add.at(corners, (from_start, to_end + 1), -amounts)
        np.add.at(corners, (to_start + 1, from_end), -amounts)
        return corners.cumsum(axis=0).cumsum(axis=1)[:-1, :-1]
