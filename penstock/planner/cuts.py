"""Cut a chain of layers into balanced stages: search all cuts, and all orders of devices.

Alpa's objective (Zheng et al. 2022, section 5), for M micro-batches and stages of t_i seconds:

    sum of all t_i + (M - 1) x the greatest t_j          M -> infinity: the slowest stage alone

What a stage costs may depend on its number and its device, and need not be the sum of what its
layers cost: values that cross its ends count too, and infinity is what does not fit.

A dynamic programme finds the least slowest stage, and for a bound on that the least sum.  Greater
bounds never make the sum greater: intervals of bounds are halved until they hold nothing better.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.errors import PartitionError
from penstock.trace.units import count_text

Matrix = NDArray[Any]
"""[start, end]: a number for layers [start, end), for every start and end from 0 to L."""
_Vector = NDArray[np.float64]
ROUNDING = 1e-9
"""Stages whose costs differ by less, as a share, are equally slow: sums of floats differ so."""
_GAP = 1e-3
"""Relative optimality gap of a search."""


class Window(NamedTuple):
    """The starts and the ends that a stage may have, in layers: each two slices of a `Matrix`."""

    starts: slice
    ends: slice


EVERYWHERE = Window(slice(None), slice(None))
"""All of a matrix."""


def windows(
    amounts: Sequence[float], limits: Sequence[float], edges: Sequence[int]
) -> list[Window] | None:
    """Return what each stage may have where its layers' amounts add up to no more than its limit;
    None where no cut at `edges` is so.

    Amounts are at least 0.  All cuts that keep to the limits are in the windows, with others.
    """
    num_stages, last = len(limits), len(edges) - 1
    every = [0, *accumulate(amounts)]
    before = [every[edge] for edge in edges]
    reach, back = [0], [last]  # the last start of each stage, and from the back the first
    for stage, limit in enumerate(limits):
        found = bisect_right(before, before[reach[-1]] + limit + _SLACK) - 1
        reach.append(min(found, last - (num_stages - stage - 1)))
    for stage in reversed(range(num_stages)):
        found = bisect_left(before, before[back[-1]] - limits[stage] - _SLACK)
        back.append(max(found, stage))
    firsts = back[::-1]
    if reach[-1] < last or any(a > b for a, b in zip(firsts, reach, strict=True)):
        return None
    bounds = [slice(edges[a], edges[b] + 1) for a, b in zip(firsts, reach, strict=True)]
    return [Window(*both) for both in pairwise(bounds)]


_SLACK = 1
"""By so much amounts may be above their limits: less than any byte matters, more than rounding."""


class Setting(NamedTuple):
    """The position of a stage: its number, and the kind of its device."""

    stage: int
    kind: int = 0


_State = tuple[int, ...]
"""How many devices of each kind the stages so far use."""


class Part(NamedTuple):
    """A stage of the cut that was found: the kind of its device, and where it starts and ends."""

    kind: int
    start: int
    end: int


class _Block(NamedTuple):
    """What a stage costs, with the numbers of its first start and its first end, from the first
    ones on that a stage in its place could have.
    """

    start: int
    end: int
    costs: Matrix


_Join = Callable[[Matrix, Matrix], Matrix]
"""(value of the stages before, cost of a stage) -> value of both."""
_Level = dict[_State, _Vector]
"""By state, the least value of the layers before each start that the next stage may have."""


@dataclass(frozen=True, slots=True)
class Search:
    """A search for the best cut at `edges` into `num_stages`, on `counts[kind]` devices of a kind.

    `cost` gives what layers take as a stage in a setting; infinity is what cannot be.  With
    `windows`, one for each stage, it gives that part of the matrix, and nothing outside it can be.
    """

    num_stages: int
    edges: NDArray[np.intp]
    cost: Callable[[Setting], Matrix]
    counts: tuple[int, ...]
    windows: Sequence[Window] | None = None

    def best(self, num_microbatches: float) -> list[list[Part]]:
        """Return the stages of the best cut, and of that for the slowest stage, if another."""
        slowest, later = self._least(np.maximum), num_microbatches - 1
        if not np.isfinite(slowest):
            return []
        best = evenest = self._within(slowest, np.square)
        if later in (0, np.inf):  # a single micro-batch gains nothing, and stages stay balanced
            return [evenest]
        # Stages may be slower if that makes their sum less by more: what the sum is at least, for
        # each interval of bounds that is left, says whether.
        best_s, least_sum_s = self._value(evenest, later), self._least(np.add)
        intervals = [(slowest, slowest, least_sum_s)]
        intervals.append((slowest, (best_s - least_sum_s) / later, least_sum_s))
        while intervals:
            low, high, least_sum_s = intervals.pop()
            if least_sum_s + later * low >= best_s * (1 - _GAP):
                continue
            middle = (low + high) / 2
            parts = self._within(middle, np.copy)
            if (value_s := self._value(parts, later)) < best_s * (1 - ROUNDING):
                best, best_s = parts, value_s
            if low < high:
                intervals.append((low, middle, sum(self._costs(parts))))
                intervals.append((middle, high, least_sum_s))
        return [best] if best is evenest else [best, evenest]

    def _within(self, bound: float, charge: Callable[[Matrix], Matrix]) -> list[Part]:
        """Return the cut whose stages keep to a bound with the least sum of what is charged."""
        most = bound * (1 + ROUNDING)

        def add(least: Matrix, cost: Matrix) -> Matrix:
            return least + charge(np.where(cost <= most, cost, np.inf))

        return self._walked_back(self._levels(add), add)

    def _value(self, parts: Sequence[Part], later: float) -> float:
        costs = self._costs(parts)
        return sum(costs) + later * max(costs)

    def _costs(self, parts: Sequence[Part]) -> list[float]:
        costs = []
        for stage, (kind, start, end) in enumerate(parts):
            first_start = first_end = 0
            if self.windows is not None:
                first_start, first_end = (own.start for own in self.windows[stage])
            matrix = self.cost(Setting(stage, kind))
            costs.append(float(matrix[start - first_start, end - first_end]))
        return costs

    def _least(self, join: _Join) -> float:
        last = self._levels(join)[-1]
        return min((float(least[-1]) for least in last.values()), default=np.inf)

    @property
    def _width(self) -> int:
        """Starts that a stage can have if every other stage has a layer."""
        return len(self.edges) - self.num_stages

    def _levels(self, join: _Join) -> list[_Level]:
        nothing = np.full(self._width, np.inf)
        nothing[0] = 0.0
        levels: list[_Level] = [{(0,) * len(self.counts): nothing}]
        for stage in range(self.num_stages):
            following: _Level = {}
            blocks: dict[Setting, _Block] = {}
            for state, setting, then in self._all_moves(levels[-1], stage):
                if setting not in blocks:
                    blocks[setting] = self._block(setting)
                known = following.setdefault(then, np.full(self._width, np.inf))
                _put_least(known, levels[-1][state], blocks[setting], join)
            levels.append(following)
        return levels

    def _walked_back(self, levels: list[_Level], join: _Join) -> list[Part]:
        state = min(levels[-1], key=lambda state: levels[-1][state][-1])
        place, parts = self._width - 1, []
        for stage in reversed(range(self.num_stages)):
            choices = [
                (before, setting, block.start, join(least[block.start : place + 1], costs))
                for before, setting, then in self._all_moves(levels[stage], stage)
                if then == state
                for block in (self._block(setting),)
                for least in (levels[stage][before][: block.start + len(block.costs)],)
                for costs in (block.costs[: place + 1 - block.start, place - block.end],)
            ]
            state, setting, first, values = min(choices, key=lambda choice: choice[3].min())
            end, place = self.edges[stage + 1 + place], first + int(values.argmin())
            parts.append(Part(setting.kind, int(self.edges[stage + place]), int(end)))
        return parts[::-1]

    def _all_moves(
        self, level: Iterable[_State], stage: int
    ) -> Iterator[tuple[_State, Setting, _State]]:
        """Yield the states, what the next stage may be on in each, and the state after it."""
        for state, (kind, count) in product(level, enumerate(self.counts)):
            if state[kind] < count:
                used = tuple(n + (k == kind) for k, n in enumerate(state))
                yield state, Setting(stage, kind), used

    def _block(self, setting: Setting) -> _Block:
        """Return the costs for those starts and ends that leave something for all other stages."""
        first, matrix = setting.stage, self.cost(setting)
        starts = self.edges[first : first + self._width]
        ends = self.edges[first + 1 : first + 1 + self._width]
        if self.windows is None:
            if len(self.edges) == len(matrix):  # every layer is an edge
                return _Block(0, 0, matrix[starts[0] : starts[-1] + 1, ends[0] : ends[-1] + 1])
            return _Block(0, 0, matrix[np.ix_(starts, ends)])
        rows, columns = self.windows[first]
        start, end = np.searchsorted(starts, rows.start), np.searchsorted(ends, columns.start)
        starts = starts[start : np.searchsorted(starts, rows.stop)]
        ends = ends[end : np.searchsorted(ends, columns.stop)]
        costs = matrix[np.ix_(starts - rows.start, ends - columns.start)]
        return _Block(int(start), int(end), costs)


_ROWS = 64
"""Starts that are looked at together: few enough for a processor's cache."""
_BACKWARDS = np.tri(_ROWS, k=-1, dtype=bool)
"""Where an end would stand before its start."""


def _put_least(known: _Vector, least: _Vector, block: _Block, join: _Join) -> None:
    """Put into `known` the least for each end over all starts before it, where that is less."""
    num_starts, num_ends = block.costs.shape
    for row in range(0, num_starts, _ROWS):
        starts = least[block.start + row : block.start + min(row + _ROWS, num_starts), None]
        if np.isfinite(starts).any():
            first = max(block.start + row, block.end)  # an end before that is before each start
            costs = block.costs[row : row + _ROWS, first - block.end :]
            found = join(starts, costs)
            backwards = _BACKWARDS[: len(starts), first - block.start - row :][:, : costs.shape[1]]
            found[:, : backwards.shape[1]][backwards] = np.inf
            ends = known[first : block.end + num_ends]
            np.minimum(ends, found.min(axis=0), out=ends)


Spans = Sequence[tuple[int, int]]
"""(start, end) of layers that are to be on one stage, in order, all layers in one."""


def cuts(
    num_stages: int,
    cost: Callable[[int], Matrix],
    spans: Spans,
    windows: Sequence[Window] | None = None,
    num_microbatches: float = np.inf,
) -> list[tuple[int, ...]]:
    """Compute the layers per stage for which the sum of stages and M - 1 times the slowest is
    least; without M, or with M = 1, the cut whose slowest stage is fastest.

    `cost(stage)[start, end]` are the seconds of layers [start, end) on that stage, whatever these
    consist of, and infinity where the stage cannot be; entries without layers are not looked at.
    It is asked several times for each stage, and may give one array for stages that are alike.

    Among cuts with the same slowest stage, up to rounding, takes the one with the least sum of
    squared stage costs, where no other is better.  Where all cuts cost the same in total that is
    the one whose stages vary least, the paper's criterion (section 2.2).

    With `windows` (see `cuts.windows`) the array is that part of the whole one.

    Exact for any cost, but for a thousandth with M; K * L^2 / 2 steps of numpy's, three times, or
    some tens of times where stages compete that cost unlike sums.

    Returns:
        That cut, then the one of the fastest slowest stage where it is another: a simulator knows
        better.  Nothing if every cut has a stage that cannot be.

    Raises:
        PartitionError: there are fewer spans than stages, or no stage is asked for.
    """
    _check_enough(len(spans), num_stages)
    edges = np.array([0, *(end for _, end in spans)])
    search = Search(num_stages, edges, lambda at: cost(at.stage), (num_stages,), windows)
    return [
        tuple(part.end - part.start for part in parts) for parts in search.best(num_microbatches)
    ]


class OnDevices(NamedTuple):
    """Layers per stage, and the kind of device that each stage is on."""

    partition: tuple[int, ...]
    kinds: tuple[int, ...]


def cut_over_devices(
    counts: Sequence[int],
    num_stages: int,
    cost: Callable[[Setting], Matrix],
    spans: Spans,
    num_microbatches: float = np.inf,
) -> OnDevices | None:
    """Compute the layers per stage and the kind of its device, as `cuts` does, over all orders.

    There are `counts[kind]` devices of each kind, one for a stage; some may stay unused.  Every
    combination of numbers of devices in use is a state: meant for few kinds.
    """
    _check_enough(len(spans), num_stages)
    if sum(counts) < num_stages:
        raise PartitionError(
            f"{num_stages} stages need a device each, and there are {sum(counts)}; choose "
            f"at most {count_text(sum(counts), 'stage')}"
        )
    edges = np.array([0, *(end for _, end in spans)])
    for parts in Search(num_stages, edges, cost, tuple(counts)).best(num_microbatches):
        sizes = tuple(part.end - part.start for part in parts)
        return OnDevices(sizes, tuple(part.kind for part in parts))
    return None


def sums(costs: Sequence[float]) -> Matrix:
    """Return what layers [start, end) cost together, for every start and end."""
    return between(upto(costs), EVERYWHERE)


def upto(costs: Sequence[float]) -> Matrix:
    """Return what the first 0, 1, ... layers cost together."""
    before: Matrix = np.array([0, *accumulate(costs)])
    return before


def between(before: Matrix, window: Window) -> Matrix:
    """Return what layers [start, end) of a window cost, from what `upto` returned."""
    return np.subtract(before[window.ends], before[window.starts, None])


def balance_spans(costs: Sequence[Sequence[float]], spans: Spans) -> tuple[int, ...]:
    """Compute the layers per stage where `costs[k][n]` is the cost of layer n on stage k."""
    return cuts(len(costs), lambda stage: sums(costs[stage]), spans)[0]


def balance(costs: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """Compute the layers per stage where a layer costs the same on every stage.

        balance([1, 1, 1, 3, 3], 3) == (3, 1, 1)

    Raises:
        PartitionError: there are fewer layers than stages, or no stage is asked for.
    """
    together = sums(costs)  # looked at several times for each stage
    return cuts(num_stages, lambda stage: together, each_layer(len(costs)))[0]


def each_layer(num_layers: int) -> Spans:
    """Return the spans of a model whose layers may all be parted."""
    return [(n, n + 1) for n in range(num_layers)]


def _check_enough(num_layers: int, num_stages: int) -> None:
    if not 1 <= num_stages <= num_layers:
        raise PartitionError(
            f"num_stages={num_stages}, but the model has {count_text(num_layers, 'layer')}; "
            f"choose at most {count_text(num_layers, 'stage')}, or give the model as more, "
            "smaller layers"
        )
