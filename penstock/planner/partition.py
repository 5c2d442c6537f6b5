"""Cut a chain of layers into balanced stages: exact, by dynamic programming.

What a stage costs may depend on its number and its device, and need not be the sum of what its
layers cost: values that cross its ends count too, and infinity is what does not fit.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from penstock.errors import PartitionError
from penstock.trace.units import count_text

from .cuts import EVERYWHERE, Matrix, Search, Setting, Window

Spans = Sequence[tuple[int, int]]
"""(start, end) of layers that are to be on one stage, in order, all layers in one."""


def cut(
    num_stages: int,
    cost: Callable[[int], Matrix],
    spans: Spans,
    windows: Sequence[Window] | None = None,
) -> tuple[int, ...] | None:
    """Compute the layers per stage that make the slowest stage as fast as it can be.

    `cost(stage)[start, end]` are the seconds of layers [start, end) on that stage, whatever these
    consist of, and infinity where the stage cannot be; entries without layers are not looked at.
    It is asked three times for each stage, and may give one array for stages that are alike.

    Among the cuts with the same slowest stage, up to rounding, takes the one with the least sum
    of squared stage costs.  Where all cuts cost the same in total that is the one whose stages
    vary least, the paper's criterion (section 2.2); where they do not, evenness is not bought by
    work that could be left out.

    With `windows` (see `cuts.windows`) the array is that part of the whole one.

    Exact for any cost; K * L^2 / 2 steps of numpy's, twice.  None if every cut has a stage that
    cannot be.

    Raises:
        PartitionError: there are fewer spans than stages, or no stage is asked for.
    """
    _check_enough(len(spans), num_stages)
    edges = np.array([0, *(end for _, end in spans)])
    counts = (num_stages,)
    found = Search(num_stages, edges, lambda at: cost(at.stage), counts, windows=windows).best()
    return None if found is None else tuple(part.end - part.start for part in found)


class OnDevices(NamedTuple):
    """Layers per stage, and the kind of device that each stage is on."""

    partition: tuple[int, ...]
    kinds: tuple[int, ...]


def cut_over_devices(
    counts: Sequence[int],
    num_stages: int,
    cost: Callable[[Setting], Matrix],
    spans: Spans,
    *,
    looks_around: bool = False,
) -> OnDevices | None:
    """Compute the layers per stage and the kind of its device, as `cut` does, over all orders.

    There are `counts[kind]` devices of each kind, one for a stage; some may stay unused.
    `cost(Setting(stage, kind))` is as in `cut`.  With `looks_around` it is asked for the kinds of
    the devices before and after, too: what a message costs depends on the link, and kinds may
    be hosts as well.  It cannot know more of the order than that: not what a value costs that
    skips stages, nor which other stages share a link.

    Exact for such costs.  For q kinds, the product of all (counts + 1) states, and q times as many
    steps of L^2 / 2 (q^3 times with `looks_around`), twice: meant for few kinds.

    Raises:
        PartitionError: there are fewer spans or devices than stages, or no stage is asked for.
    """
    _check_enough(len(spans), num_stages)
    if sum(counts) < num_stages:
        raise PartitionError(
            f"{num_stages} stages need a device each, and there are {sum(counts)}; choose "
            f"at most {count_text(sum(counts), 'stage')}"
        )
    edges = np.array([0, *(end for _, end in spans)])
    found = Search(num_stages, edges, cost, tuple(counts), looks_around).best()
    if found is None:
        return None
    sizes = tuple(part.end - part.start for part in found)
    return OnDevices(sizes, tuple(part.kind for part in found))


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
    """Compute the layers per stage where `costs[k][n]` is the cost of layer n on stage k.

    Raises:
        PartitionError: there are fewer spans than stages.
    """
    found = cut(len(costs), lambda stage: sums(costs[stage]), spans)
    assert found is not None, "no cost is infinite"
    return found


def balance(costs: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """Compute the layers per stage where a layer costs the same on every stage.

        balance([1, 1, 1, 3, 3], 3) == (3, 1, 1)

    Raises:
        PartitionError: there are fewer layers than stages, or no stage is asked for.
    """
    together = sums(costs)
    found = cut(num_stages, lambda stage: together, each_layer(len(costs)))
    assert found is not None, "no cost is infinite"
    return found


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


def lingvo_cut(costs: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """Compute the layers per stage as the paper's code does, to compare with.

        lingvo_cut([1, 1, 1, 3, 3], 3) == (2, 1, 2)

    Walks over the layers once; a layer goes where its share of all costs, with those before it,
    ends: stage min(floor(K * share), K - 1).  A layer across a boundary is so on the later stage,
    and a stage may be left empty.  The paper states another aim, the least variance of costs
    (Huang et al. 2019, section 2.2); its costs are FLOPs, estimated.  See
    PartitionSequentialLayers in tensorflow/lingvo, core/gpipe.py.

    Raises:
        PartitionError: no stage is asked for, or layers cost nothing.
    """
    *_, total = accumulate(costs, initial=0.0)
    if num_stages < 1 or total <= 0:
        raise PartitionError(
            f"num_stages={num_stages} of layers that cost {total} together; give at least one "
            "stage, and costs above 0"
        )
    sizes = [0] * num_stages
    for so_far in accumulate(costs):
        sizes[min(int(num_stages * so_far / total), num_stages - 1)] += 1
    return tuple(sizes)
