"""Cut a chain of layers into balanced stages: search all cuts, and all orders of devices.

The cost of a stage may depend on its number and its device, and need not be the sum of its layers'
costs: values that cross its ends count too, and infinity is what does not fit.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from penstock.errors import PartitionError
from penstock.trace.units import count_text

from .stage_program import Block, Matrix, Stages
from .stage_search import ROUNDING, Part, Search, Within, step_s

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
    It is asked once for each stage, and may give one array for stages that are alike.

    Among cuts with the same slowest stage, up to rounding, takes the one with the least sum of
    squared stage costs, where no other is better.  Where all cuts cost the same in total that is
    the one whose stages vary least, the paper's criterion (section 2.2).

    With `windows` (see `cuts.windows`) the array is that part of the whole one.

    Exact for any cost, but for a thousandth with M; K * L^2 / 2 steps of numpy's, twice, or some
    tens of times where stages compete that cost unlike sums.

    Returns:
        That cut, then the one of the fastest slowest stage where it is another: a simulator knows
        better.  Nothing if every cut has a stage that cannot be.

    Raises:
        PartitionError: there are fewer spans than stages, or no stage is asked for.
    """
    _check_enough(len(spans), num_stages)
    edges = _edges(spans)
    blocks = _blocks(num_stages, 1, edges, lambda at: cost(at.stage), windows)
    sizes = np.zeros((1, 0), dtype=int)
    stages = Stages(
        num_cuts=len(spans), num_stages=num_stages, block=blocks, sizes=sizes, is_exact=True
    )
    return [_partition(parts, edges) for parts in _best(stages, num_microbatches)]


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
    edges = _edges(spans)
    stages = Stages(
        num_cuts=len(spans),
        num_stages=num_stages,
        block=_blocks(num_stages, len(counts), edges, cost),
        sizes=np.eye(len(counts), dtype=int),
        devices=tuple(counts),
        is_exact=True,
    )
    for parts in _best(stages, num_microbatches):
        return OnDevices(_partition(parts, edges), tuple(part.mesh for part in parts))
    return None


def _edges(spans: Spans) -> Matrix:
    return np.array([0, *(end for _, end in spans)])


def _partition(parts: Sequence[Part], edges: Matrix) -> tuple[int, ...]:
    return tuple(int(edges[part.end] - edges[part.start]) for part in parts)


def _blocks(
    num_stages: int,
    num_kinds: int,
    edges: Matrix,
    cost: Callable[[Setting], Matrix],
    windows: Sequence[Window] | None = None,
) -> Callable[[int], Block]:
    """Return the costs of a stage on each kind of device, by the number of stages from it on."""
    known = dict[tuple[int, ...], tuple[list[Matrix], Block]]()

    @cache
    def block(left: int) -> Block:
        stage = num_stages - left
        every = [cost(Setting(stage, kind)) for kind in range(num_kinds)]
        if windows is not None:
            return _block(every, edges, windows[stage])
        key = tuple(map(id, every))
        if key not in known:  # one for stages that are alike
            known[key] = every, _block(every, edges)
        return known[key][1]

    return block


def _block(every: Sequence[Matrix], edges: Matrix, window: Window = EVERYWHERE) -> Block:
    """Return the costs of a stage from edge to edge, of matrices from layer to layer."""
    sides = [(side.start or 0, side.stop or edges[-1] + 1) for side in window]
    starts, ends = (np.flatnonzero((edges >= a) & (edges < b)) for a, b in sides)
    at = np.ix_(edges[starts] - sides[0][0], edges[ends] - sides[1][0])
    costs = np.stack([matrix[at].T for matrix in every])
    costs = np.where(starts < ends[:, None], costs, np.inf)
    return Block(int(starts[0]), int(ends[0]), costs, costs)


def _best(stages: Stages, num_microbatches: float) -> list[tuple[Part, ...]]:
    """Return the stages of the best cut, and of that for the slowest stage, if another."""
    slowest, later = stages.slowest(), num_microbatches - 1
    if not np.isfinite(slowest):
        return []
    evenest = Within(stages, slowest * (1 + ROUNDING), charge=np.square).best()[0]
    if later in (0, np.inf):  # a single micro-batch gains nothing, and stages stay balanced
        return [evenest]
    search = Search(stages, int(num_microbatches), 1, _GAP)
    search.keep(evenest)
    search.run(slowest)
    best, evenest_s = search.best[0], step_s(stages, evenest, later)
    return [best, evenest] if search.best_s < evenest_s * (1 - ROUNDING) else [evenest]


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
    together = sums(costs)  # of all stages
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
