"""The shortest step of all: every order of every rank, by dynamic programming.

A state is how many forwards, gradients of inputs and gradients of weights each stage has done, and
which rank stands right behind a forward of its own; a way to it is when each rank is free, and
when what it was sent arrives.  Of two ways the one that is nowhere earlier is dropped.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from operator import le
from typing import Any

from penstock.schedules import AtMostBytes, Sizes
from penstock.schedules.costs import Costs, PerStage, per_edge, per_stage

Counts = tuple[tuple[int, int, int], ...]
FREE = AtMostBytes(Sizes(kept_bytes=0), 0)


@dataclass(frozen=True)
class Way:
    """When ranks are free, when forwards and gradients arrive that are not used yet, what is kept
    in bytes, and after which forward (stage) each rank stands.
    """

    free: tuple[Any, ...]
    forwards: tuple[tuple[Any, ...], ...]
    gradients: tuple[tuple[Any, ...], ...]
    live: tuple[int, ...]
    after: tuple[int, ...]

    def label(self, ranks: tuple[int, ...]) -> tuple[Any, ...]:
        waiting = (
            max(self.free[ranks[stage]], x)
            for arrivals in (self.forwards, self.gradients)
            for stage, times in enumerate(arrivals)
            for x in times
        )
        return (*self.free, *waiting)


@dataclass(frozen=True, kw_only=True)
class Exact:
    """What is to be run."""

    costs: Costs
    ranks: tuple[int, ...]
    num_microbatches: int
    memory: AtMostBytes = FREE
    recompute: tuple[int, ...] = ()

    def shortest(self, below: Any = float("inf")) -> Any:
        """Return the length of the shortest step, if it is less than `below`, or else that."""
        k, m = len(self.ranks), self.num_microbatches
        num_ranks = 1 + max(self.ranks)
        nothing = ((),) * k
        there = ((0,) * m, *nothing[1:])
        way = Way((0,) * num_ranks, there, nothing, (0,) * num_ranks, (-1,) * num_ranks)
        levels: list[dict[Any, list[Way]]] = [defaultdict(list) for _ in range(3 * k * m + 1)]
        levels[0][((0, 0, 0),) * k, way.after] = [way]
        for level in levels[:-1]:
            for then, later in self.further(level):
                if self.least(then, later) < below:
                    key = then, later.after if self.recompute else ()
                    levels[sum(map(sum, then))][key].append(later)
            level.clear()
        ends = [max(way.free) for ways in levels[-1].values() for way in ways]
        return min(ends, default=below)

    def further(self, level: dict[Any, list[Way]]) -> Iterator[tuple[Counts, Way]]:
        """Yield all that one more operation leads to from the best ways to some states."""
        for (counts, _), ways in level.items():
            for way in undominated(ways, self.ranks):
                yield from self.next_of(counts, way)

    def least(self, counts: Counts, way: Way) -> Any:
        """Return a time before which the step cannot end: of the rank with most left to do."""
        forward_s, input_s, weight_s, backward_s = self.times()
        left = list(way.free)
        for stage, (f, g, w) in enumerate(counts):
            together = min(input_s[stage] + weight_s[stage], backward_s[stage])
            undone = self.num_microbatches - g
            left[self.ranks[stage]] += (self.num_microbatches - f) * forward_s[stage]
            left[self.ranks[stage]] += undone * together + (g - w) * weight_s[stage]
        return max(left)

    def times(self) -> tuple[tuple[Any, ...], ...]:
        k = len(self.ranks)
        return (
            per_stage(self.costs.forward_s, k, "forward_s"),
            *self.costs.parts(k),
            per_stage(self.costs.backward_s, k, "backward_s"),
        )

    def next_of(self, counts: Counts, way: Way) -> Iterator[tuple[Counts, Way]]:
        """Yield all that one more operation can lead to."""
        for stage, (f, g, w) in enumerate(counts):
            if f < self.num_microbatches and way.forwards[stage]:
                yield self.after(counts, way, stage, (1, 0, 0))
            known = way.gradients[stage] or (stage == len(counts) - 1 and f > g)
            if g < f and known:
                yield self.after(counts, way, stage, (0, 1, 0))
                if w == g:
                    yield self.after(counts, way, stage, (0, 1, 1))
            if w < g:
                yield self.after(counts, way, stage, (0, 0, 1))

    def after(
        self, counts: Counts, way: Way, stage: int, step: tuple[int, int, int]
    ) -> tuple[Counts, Way]:
        """Do one more operation; too many bytes make it last for ever."""
        rank, k = self.ranks[stage], len(counts)
        kind = ((1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1)).index(step)
        kept = self.memory.sizes.of_stages(k)[stage]
        drops = stage in self.recompute
        first = kept.inputs if drops else kept.graph
        again = drops and step[1] and way.after[rank] != stage
        again = again or (drops and step[1] and counts[stage][0] != counts[stage][1] + 1)
        start, live = way.free[rank], way.live[rank]
        peak = live + (kept.graph - first if step[1] else 0)
        live += (first, kept.weights - first, -kept.weights, -first)[kind]
        if again:
            start += self.costs.again(k)[stage]
        forwards, gradients = list(way.forwards), list(way.gradients)
        if step[0]:
            start = max(start, forwards[stage][0]) + self.busy_s(self.costs.receive_s, stage, -1)
            forwards[stage] = forwards[stage][1:]
        elif step[1] and stage < k - 1:
            start = max(start, gradients[stage][0]) + self.busy_s(self.costs.receive_s, stage, 1)
            gradients[stage] = gradients[stage][1:]
        end = start + self.times()[kind][stage]
        if max(peak, live) > self.memory.limits(1 + max(self.ranks))[rank]:
            end = float("inf")
        if step[0] or step[1]:
            end += self.busy_s(self.costs.send_s, stage, 1 if step[0] else -1)
        if step[0] and stage < k - 1:
            forwards[stage + 1] += (end + self.travel_s(stage, stage + 1),)
        if step[1] and stage:
            gradients[stage - 1] += (end + self.travel_s(stage - 1, stage),)
        f, g, w = counts[stage]
        then = (f + step[0], g + step[1], w + step[2])
        done = (*counts[:stage], then, *counts[stage + 1 :])
        return done, Way(
            put(way.free, rank, end),
            tuple(forwards),
            tuple(gradients),
            put(way.live, rank, live),
            put(way.after, rank, stage if step[0] else -1),
        )

    def busy_s(self, costs_s: PerStage, stage: int, towards: int) -> Any:
        """Say what a stage's rank takes for a message from or to the stage after it, or before."""
        k, peer = len(self.ranks), stage + towards
        if not 0 <= peer < k or self.ranks[stage] == self.ranks[peer]:
            return 0
        return per_stage(costs_s, k, "of messages")[stage]

    def travel_s(self, stage: int, to: int) -> Any:
        here, there = self.ranks[stage], self.ranks[to]
        return 0 if here == there else per_edge(self.costs.transfer_s)(stage, to)


def put(values: tuple[Any, ...], place: int, value: Any) -> tuple[Any, ...]:
    return (*values[:place], value, *values[place + 1 :])


def undominated(ways: list[Way], ranks: tuple[int, ...]) -> list[Way]:
    """Drop each way that another one is nowhere later than."""
    kept: list[tuple[tuple[Any, ...], Way]] = []
    for label, way in sorted(((way.label(ranks), way) for way in ways), key=lambda x: x[0]):
        if not any(all(map(le, other, label)) for other, _ in kept):
            kept.append((label, way))
    return [way for _, way in kept]
