"""The dynamic program of stages: what those from each layer on cost at least.

For a bound t_max on the greatest t_j, the least sum is computed from the last layer on:

    F(s, k, d) = min over the end i and the mesh m of   t(s, k, i, m) + F(s - 1, i, d - m)

with s stages from layer k on and d devices left of each kind.  One device is a mesh of one, and
where the placement of stages is decided no devices are counted: d has no axes.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import inf
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[Any]
"""[start, end]: a number for layers [start, end), for every start and end from 0 to L."""
_MOST_AT_ONCE = 1 << 16
"""Numbers that are looked at together: few enough for a processor's cache."""
_FIRST_LIMIT, _WIDER = 1.1, 1.5
"""The slowest stage is looked for up to so many times a lower bound, and then up to so many more
times the limit before: a low limit leaves few states.
"""


class Block(NamedTuple):
    """What stages in one position cost, as [mesh, end, start]: of the cuts from a first start and
    a first end on, which are numbered from 0.

    `pace` are the seconds between micro-batches and `total` those that are summed, both infinite
    for what cannot be.
    """

    start: int
    end: int
    pace: Matrix
    total: Matrix


@dataclass(frozen=True, kw_only=True)
class Stages:
    """All stages that there may be: at most `num_stages`, or exactly so many if it `is_exact`.

    `block(s)` are the costs of a stage that s - 1 others follow; equal ones are one object.  Where
    these are many, `options` are few blocks that have each of their numbers.  `sizes` has the
    devices of each kind that a mesh uses, and `devices` those that there are;
    `may_be_next[mesh, devices left]` tells where a mesh may come, None anywhere.
    """

    num_cuts: int
    num_stages: int
    block: Callable[[int], Block]
    sizes: NDArray[np.intp]
    devices: tuple[int, ...] = ()
    is_exact: bool = False
    may_be_next: Matrix | None = None
    options: Sequence[Block] = ()

    @property
    def blocks(self) -> Sequence[Block]:
        """Blocks with the costs of all stages that there may be."""
        every = map(self.block, range(1, self.num_stages + 1))
        return self.options or [*{id(block): block for block in every}.values()]

    @cached_property
    def _lowest(self) -> Sequence[Block]:
        """Blocks such that each stage costs no less than in one of them."""
        if not self.options:
            return self.blocks
        pace, total = (np.min(own, axis=0) for own in list(zip(*self.options, strict=True))[2:])
        return [Block(0, 0, pace, total)]

    def least_before(self, cost: Callable[[Block], Matrix]) -> Matrix:
        """Return a lower bound on the sum of costs of all layers before each cut."""
        every = np.full((self.num_cuts + 1, self.num_cuts + 1), inf)
        for block in self._lowest:
            costs = cost(block).min(axis=0, initial=inf)
            num_ends, num_starts = costs.shape
            at = every[block.end : block.end + num_ends, block.start : block.start + num_starts]
            np.minimum(at, costs, out=at)
        least = np.zeros(self.num_cuts + 1)
        for end in range(1, len(least)):
            least[end] = (least[:end] + every[end, :end]).min()
        return least

    def slowest(self, most_s: float = inf) -> float:
        """Return the seconds of the slowest stage where that is fastest; infinite if these are
        more than `most_s` or there is no answer.
        """
        limit = highest = inf
        if self.devices:  # all devices together do what the stages do, the slowest most
            sizes = self.sizes.sum(axis=1)[:, None, None]
            work = self.least_before(lambda block: sizes * block.pace)
            limit = _FIRST_LIMIT * float(work[-1]) / sum(self.devices)
            paces = (block.pace[np.isfinite(block.pace)] for block in self.blocks)
            highest = max((float(pace.max(initial=0.0)) for pace in paces), default=0.0)
        while True:
            found = min(Program(self, partial(_up_to, limit), np.maximum).least)[0]
            if found <= limit or limit >= most_s:
                return found if found <= most_s else inf
            limit = max(limit * _WIDER, 0.01 * highest) if limit < highest else inf


class Program:
    """The dynamic program for one way to price stages: `cost` of a block, joined to what follows.

    `levels[s]` is F(s) as [cut, devices left of each kind ...], infinite where nothing can be.
    Where devices are counted, states are left out that no answer within the limit can have.
    """

    def __init__(
        self,
        stages: Stages,
        cost: Callable[[Block], Matrix],
        join: Callable[[Matrix, Matrix], Matrix] = np.add,
        limit: float = inf,
    ) -> None:
        self.stages, self._cost, self._join, self._limit = stages, cost, join, limit
        self._known = dict[int, tuple[Block, Matrix]]()
        self._known_rows = dict[int, tuple[Matrix, Matrix]]()
        self._before, self._most_left = np.zeros(0), np.zeros(0)
        devices = stages.devices
        if devices and limit < inf:
            self._before = stages.least_before(self.costs).reshape(-1, *(1 for _ in devices))
        if len(devices) == 1:  # what the layers before a start need has to stay over
            sizes = stages.sizes[:, :, None]
            spare = stages.least_before(lambda b: np.where(np.isfinite(self.costs(b)), sizes, inf))
            self._most_left = devices[0] - np.minimum.accumulate(spare[::-1])[::-1][:, None]
        self.levels = [*self._levels()]

    def costs(self, block: Block) -> Matrix:
        """Return the costs of a block as [mesh, end, start]."""
        if id(block) not in self._known:
            self._known[id(block)] = block, self._cost(block)
        return self._known[id(block)][1]

    def costs_at(self, left: int, at: Any) -> Matrix:
        """Return costs of a stage that is the first of so many, `at` an index of its block."""
        found: Matrix = self.costs(self.stages.block(left))[at]
        return found

    def _rows(self, block: Block) -> tuple[Matrix, Matrix]:
        """Return the first start with finite costs, and one after the last, as [mesh, end]."""
        if id(block) not in self._known_rows:
            is_there = np.isfinite(self.costs(block))
            first, last = is_there.argmax(axis=2), is_there[..., ::-1].argmax(axis=2)
            last = np.where(is_there.any(axis=2), is_there.shape[2] - last, 0)
            self._known_rows[id(block)] = first + block.start, last + block.start
        return self._known_rows[id(block)]

    @property
    def least(self) -> list[tuple[float, int]]:
        """F of all layers on all devices, each with its number of stages, the least first."""
        stages = self.stages
        numbers = [stages.num_stages] if stages.is_exact else range(1, stages.num_stages + 1)
        at = 0, *stages.devices
        every = ((self.levels[n][at] if n < len(self.levels) else inf, n) for n in numbers)
        return sorted((float(sum_s), n) for sum_s, n in every)

    def _levels(self) -> Iterator[Matrix]:
        stages, devices = self.stages, self.stages.devices
        here = np.full((stages.num_cuts + 1, *(number + 1 for number in devices)), inf)
        here[-1] = 0.0
        yield here
        for left in range(1, stages.num_stages + 1):
            if len(self._before):
                here = np.where(here + self._before > self._limit, inf, here)
            here = self._with_one_more(left, here)
            if len(self._most_left):
                here[np.arange(devices[0] + 1) > self._most_left] = inf
            if not np.isfinite(here).any():
                break
            yield here

    def _with_one_more(self, left: int, after: Matrix) -> Matrix:
        """Return F(left) by F(left - 1)."""
        # 1. The states that may come after a stage, and the meshes that this may have before each,
        #    ordered by the devices left of all kinds, as one number.
        stages, block = self.stages, self.stages.block(left)
        here = np.full(after.shape, inf)
        meshes, ends, to, values = self._moves(after)
        is_there = (ends >= block.end) & (ends < block.end + block.pace.shape[1])
        meshes, ends, to, values = (own[is_there] for own in (meshes, ends, to, values))
        # 2. If there are many, some starts at a time, with what one of them may have.
        flat, num_starts = here.reshape(len(here), -1), block.pace.shape[2]
        first = max(block.start, (stages.num_stages - left) * stages.is_exact)
        starts = range(first, block.start + num_starts) if len(ends) else range(0)
        is_much = len(ends) * len(starts) > _MOST_AT_ONCE
        if is_much:
            low, high = (own[meshes, ends - block.end] for own in self._rows(block))
            is_there = low < high
            moves = meshes, ends, to, values, low, high
            meshes, ends, to, values, low, high = (own[is_there] for own in moves)
        step = max(1, _MOST_AT_ONCE // max(len(ends), 1))
        for begin in starts[::step]:
            stop, near = min(begin + step, starts.stop), np.arange(len(ends))
            if is_much:
                near = np.flatnonzero((low < stop) & (high > begin))
            if not len(near):
                continue
            # 3. The least for each number of devices left.
            rows, to_near = slice(begin - block.start, stop - block.start), to[near]
            at: Any = meshes[near], ends[near] - block.end, rows
            if not stages.devices and at[1][-1] - at[1][0] == len(near) - 1:  # neighbours
                at = 0, slice(at[1][0], at[1][-1] + 1), rows
            joined = self._join(self.costs_at(left, at), values[near, None])
            if to_near[0] == to_near[-1]:
                flat[begin:stop, to_near[0]] = joined.min(axis=0)
            else:
                groups = np.flatnonzero(np.diff(to_near, prepend=-1))
                flat[begin:stop, to_near[groups]] = np.minimum.reduceat(joined, groups, axis=0).T
        return here

    def _moves(self, after: Matrix) -> tuple[Matrix, Matrix, Matrix, Matrix]:
        """Return for each mesh that a stage may have and each state after it: the mesh, the cut,
        the devices left before the stage, and the value of the state.
        """
        devices, may_be = self.stages.devices, self.stages.may_be_next
        if not devices:
            ends = np.flatnonzero(np.isfinite(after))
            nothing = np.zeros(len(ends), dtype=int)
            return nothing, ends, nothing, after[ends]
        ends, *rest = np.nonzero(np.isfinite(after))
        left = np.stack(rest, axis=1)[:, None] + self.stages.sizes
        fits = (left <= devices).all(axis=2)
        states, meshes = np.nonzero(fits)
        to = np.ravel_multi_index([*left[fits].T], tuple(number + 1 for number in devices))
        if may_be is not None:
            may = may_be[(meshes, *left[fits].T)]
            states, meshes, to = states[may], meshes[may], to[may]
        order = np.argsort(to, kind="stable")
        states = states[order]
        return meshes[order], ends[states], to[order], after[np.isfinite(after)][states]


def _up_to(limit: float, block: Block) -> Matrix:
    return np.where(block.pace <= limit, block.pace, inf)
