"""Gather seconds of layers over several runs, those of layers that are alike together."""

from collections import defaultdict
from collections.abc import Collection, Hashable, Sequence
from statistics import median, quantiles
from typing import NamedTuple

from .marks import Mark, seconds_between

PARTS = ("forward_s", "recompute_s", "backward_s", "input_s", "weight_s")
"""Of a step, as in `LayerSeconds`."""


class _Taken(NamedTuple):
    """What a layer took once: which part of a step, from when to when."""

    layer: int
    kind: Hashable
    part: str
    start: Mark
    end: Mark


class Samples:
    """Seconds by kind of layer and part of a step, such as "forward_s"."""

    def __init__(self) -> None:
        self._taken: list[_Taken] = []
        self._found: defaultdict[tuple[Hashable, str], list[float]] = defaultdict(list)
        self._sums: defaultdict[Hashable, list[float]] = defaultdict(list)

    def add(self, layer: int, kind: Hashable, part: str, start: Mark, end: Mark) -> None:
        """Note what a layer took."""
        self._taken.append(_Taken(layer, kind, part, start, end))

    def end_run(self, *, counts: bool) -> None:
        """Take in what was noted in a run of the model, if it `counts`."""
        taken, self._taken = self._taken, []
        if not counts:
            return
        sums: dict[int, dict[str, float]] = {}
        kinds: dict[int, Hashable] = {}
        for layer, kind, part, start, end in taken:
            seconds = seconds_between(start, end)
            self._found[kind, part].append(seconds)
            kinds[layer] = kind
            sums.setdefault(layer, {})[part] = seconds
        for layer, parts in sums.items():
            if "forward_s" in parts and "backward_s" in parts:
                self._sums[kinds[layer]].append(parts["forward_s"] + parts["backward_s"])

    def median(self, kinds: Collection[Hashable], part: str) -> float | None:
        """Return the middle of what layers of these kinds took; None if it was not measured."""
        found = [seconds for kind in kinds for seconds in self._found.get((kind, part), ())]
        return median(found) if found else None

    def spread(self, kinds: Collection[Hashable]) -> float:
        """Return half the distance between the quartiles of forward plus backward, as a share of
        their median.
        """
        return _spread([seconds for kind in kinds for seconds in self._sums.get(kind, ())])


def _spread(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return (high - low) / 2 / middle if middle else 0.0
