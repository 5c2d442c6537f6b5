"""Choose the partition, the placement and the schedule of a plan together.

Small changes are tried, priced by the simulator, and kept while they help:

    partition   [ 3 | 2 | 4 ]  ─►  [ 2 | 3 | 4 ]     a layer moves to the next stage
    placement   (0, 1, 2, 1)   ─►  (0, 1, 2, 0)      a stage moves to another rank
    schedule    is made anew for what the stages then cost: `critical_path`
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from math import ceil, inf
from operator import le

from penstock.schedules.costs import Costs
from penstock.schedules.critical_path import critical_path
from penstock.schedules.family import in_turn, zigzag
from penstock.schedules.laws import AtMostBytes
from penstock.schedules.memory import Sizes
from penstock.types import Recompute

from .bounds import Load, rank_ends_s
from .candidates import Size
from .plan import Plan
from .predict import Prediction
from .price import runs_of
from .search import Evaluator

_PARTS = 10_000
"""Costs and bytes in a schedule's arguments are parts of the largest one: so many."""
_BALANCED = 200
"""So often a cut is changed at most before its first schedule is made."""


@dataclass(frozen=True, slots=True)
class Cut:
    """The number of layer spans of each stage, and its rank."""

    spans: tuple[int, ...]
    ranks: tuple[int, ...]


class Tuner:
    """Looks for a faster plan of a size than one that is known; `left` plans are made at most."""

    def __init__(self, evaluator: Evaluator, size: Size, most_on_rank: int, left: int) -> None:
        self.evaluator, self.size = evaluator, size
        self.most_on_rank, self.left = most_on_rank, left
        self._best_s = inf
        self._best: tuple[Size, Prediction] | None = None
        self._tried: set[Cut] = set()

    def run(self, start: Prediction) -> tuple[Size, Prediction] | None:
        """Return the fastest plan found that is faster than `start` and fits, after its size.

        From each of several cuts, the fastest first, the next faster neighbour is taken until
        there is none.
        """
        self._best_s = start.quick_step_s
        starts = [(self._step_s(cut), cut) for cut in dict.fromkeys(self._starts(start))]
        for first_s, first in sorted(starts, key=lambda pair: pair[0]):
            at_s, at = first_s, first
            while (step := self._faster(at_s, at)) is not None:
                at_s, at = step
        return self._best

    def _faster(self, at_s: float, at: Cut) -> tuple[float, Cut] | None:
        """Return the first neighbour that takes less time than a cut does, and how much."""
        for cut in sorted(self._neighbours(at), key=self.bound_s):
            if cut not in self._tried and (took_s := self._step_s(cut)) < at_s:
                return took_s, cut
        return None

    def _step_s(self, cut: Cut) -> float:
        """Return the seconds of a cut's plan, and keep it if it is the fastest; infinity where it
        does not fit, cannot be the fastest, or enough plans were made.
        """
        if not self.left or self.bound_s(cut) >= self._best_s:
            return inf
        self._tried.add(cut)
        self.left -= 1
        found, size = self._predicted(cut), self._size(cut)
        if found is None or not self.evaluator.fits(size, found):
            return inf
        took_s = found.quick_step_s
        if took_s < self._best_s:
            self._best_s, self._best = took_s, (size, found)
        return took_s

    def bound_s(self, cut: Cut) -> float:
        """Return seconds that no schedule of a cut can take less than."""
        return max(self._rank_s(cut))

    def _rank_s(self, cut: Cut) -> list[float]:
        """Return for each rank the seconds that it cannot end before."""
        loads = []
        for rank, (start, end) in zip(cut.ranks, runs_of(cut.spans), strict=True):
            forward_s, back_s, busy_s = (upto[end] - upto[start] for upto in self._upto[rank])
            loads.append(Load(rank, forward_s, back_s, forward_s + back_s, busy_s))
        ends_s = rank_ends_s(loads, self.size.num_microbatches)
        return [ends_s.get(rank, 0.0) for rank in range(self.size.num_ranks)]

    @cached_property
    def _upto(self) -> list[list[list[float]]]:
        """For each rank, the seconds on its device of all spans before each: of forwards, of the
        least of backwards that others wait for, and of all work.
        """
        found = []
        for place in self.evaluator.places_of(self.size)[: self.size.num_ranks]:
            layers = self.evaluator.layers_at(self.size, place)
            each = [
                (
                    x.forward_s,
                    min(x.backward_s, x.input_s),
                    x.forward_s + min(x.backward_s, x.input_s + x.weight_s),
                )
                for x in layers
            ]
            spans = self.evaluator.profile.spans
            found.append(
                [
                    [*accumulate((sum(values[a:b]) for a, b in spans), initial=0.0)]
                    for values in zip(*each, strict=True)
                ]
            )
        return found

    def _starts(self, start: Prediction) -> Iterator[Cut]:
        """Yield the cut of a plan, and balanced ones on several placements."""
        num_spans = len(self.evaluator.profile.spans)
        ends = {end: n for n, (_, end) in enumerate(self.evaluator.profile.spans, 1)}
        borders = [0, *(ends[end] for end in accumulate(start.plan.partition))]
        yield Cut(tuple(b - a for a, b in pairwise(borders)), start.plan.placement.places)
        for ranks in dict.fromkeys(self._placements()):
            if len(ranks) <= num_spans and max(Counter(ranks).values()) <= self.most_on_rank:
                yield self._balanced(ranks)

    def _placements(self) -> Iterator[tuple[int, ...]]:
        """Yield the ranks of stages: a chain, a loop, a V, a ring that is closed, and Vs between
        ranks that have one stage.
        """
        last = self.size.num_ranks - 1
        chain = (*range(last + 1),)
        yield chain
        yield in_turn(2 * last + 2, last + 1)
        yield zigzag(2 * last + 2, last + 1)
        yield (*chain, 0)
        inner = zigzag(2 * last - 2, last - 1) if last > 1 else ()
        yield (0, *(1 + rank for rank in inner), last)
        yield (*chain, *reversed(chain[1:-1]))
        yield (*chain[:-1], *reversed(chain[1:]))

    def _balanced(self, ranks: tuple[int, ...]) -> Cut:
        """Return a cut whose ranks have about as much to do, by the bound alone."""
        num_spans, counted = len(self.evaluator.profile.spans), Counter(ranks)
        work_s = self._upto[0][2]
        shares = list(accumulate(1 / counted[rank] for rank in ranks))
        ends, at = [0], 0
        for stage, share in enumerate(shares[:-1], 1):
            goal = work_s[-1] * share / shares[-1]
            most = num_spans - (len(ranks) - stage)
            at += 1
            while at < most and abs(work_s[at + 1] - goal) < abs(work_s[at] - goal):
                at += 1
            ends.append(at)
        cut = Cut(tuple(b - a for a, b in pairwise([*ends, num_spans])), ranks)
        for _ in range(_BALANCED):
            better = min(self._neighbours(cut), key=self._unevenness, default=cut)
            if self._unevenness(better) >= self._unevenness(cut):
                break
            cut = better
        return cut

    def _unevenness(self, cut: Cut) -> tuple[float, float]:
        of_ranks = self._rank_s(cut)
        return max(of_ranks), sum(s * s for s in of_ranks)

    def _neighbours(self, cut: Cut) -> Iterator[Cut]:
        """Yield the cuts that are one change away."""
        counted = Counter(cut.ranks)
        for border in range(len(cut.spans) - 1):
            for change in (1, -1):
                spans = list(cut.spans)
                spans[border] += change
                spans[border + 1] -= change
                if min(spans) > 0:
                    yield replace(cut, spans=tuple(spans))
        for stage, rank in enumerate(cut.ranks):
            for other in range(self.size.num_ranks) if counted[rank] > 1 else ():
                if other != rank and counted[other] < self.most_on_rank:
                    ranks = (*cut.ranks[:stage], other, *cut.ranks[stage + 1 :])
                    yield replace(cut, ranks=ranks)

    def _size(self, cut: Cut) -> Size:
        return replace(self.size, stages_per_rank=1, stages=len(cut.ranks))

    def _predicted(self, cut: Cut) -> Prediction | None:
        """Return the faster one of a schedule that keeps what it likes and one that keeps to the
        memory there is; None if neither fits.
        """
        spans = self.evaluator.profile.spans
        edges = [0, *(spans[end - 1][1] for end in accumulate(cut.spans))]
        partition = tuple(b - a for a, b in pairwise(edges))
        own, size = self.evaluator, self._size(cut)
        draft = own.draft(size, critical_path(ranks=cut.ranks), partition)
        costs = relative(self.evaluator.predicted(draft))
        found = own.plan_at(size, critical_path(costs, cut.ranks), partition)
        if found is not None and not found.recomputing:
            return self.evaluator.predicted(found)
        memory = self._room(cut, partition)
        lean = memory and own.plan_at(size, critical_path(costs, cut.ranks, memory), partition)
        both = [self.evaluator.predicted(each) for each in (found, lean) if isinstance(each, Plan)]
        return min(both, key=lambda each: each.quick_step_s, default=None)

    def _room(self, cut: Cut, partition: tuple[int, ...]) -> AtMostBytes | None:
        """Return the memory that ranks have beside weights, in parts of the largest; None if it
        is not enough for one micro-batch.
        """
        size, num_stages = self._size(cut), len(partition)
        prices = self.evaluator.prices(size, critical_path(ranks=cut.ranks), None)
        kept = prices.of_stages.sizes(partition, (Recompute.NEVER,) * num_stages)
        limits, needed = [*self.evaluator.limits_of(size)], [0] * size.num_ranks
        stages = zip(cut.ranks, runs_of(partition), kept.of_stages(num_stages), strict=True)
        for rank, (start, end), own in stages:
            limits[rank] -= sum(prices.lasting[start:end])
            needed[rank] += max(own.graph, own.weights)
        if any(map(le, limits, needed)):
            return None
        unit = max(limits) / _PARTS
        graphs, weights = (
            tuple(ceil(getattr(own, name) / unit) for own in kept.of_stages(num_stages))
            for name in ("graph", "weights")
        )
        sizes = Sizes(kept_bytes=graphs, weight_bytes=weights)
        memory = AtMostBytes(sizes, tuple(int(limit / unit) for limit in limits))
        least = Counter[int]()
        for rank, graph, left in zip(cut.ranks, graphs, weights, strict=True):
            least[rank] += max(graph, left)
        is_enough = all(least[r] <= limit for r, limit in enumerate(memory.limits(size.num_ranks)))
        return memory if is_enough else None


def relative(predicted: Prediction) -> Costs:
    """Return what a list schedule is made for, as parts of the largest number: what stages take
    with all that is computed twice or moved, and their messages.
    """
    given, ranks = predicted.costs, predicted.plan.placement.places
    again = given.again(len(ranks))
    edges = {
        (s, s + 1): predicted.sharing.way_of((False, s, s + 1))
        for s, (here, there) in enumerate(pairwise(ranks))
        if here != there
    }
    by_stage = {
        "forward_s": (given.forward_s, given.offload_s),
        "backward_s": (given.backward_s, again, given.fetch_s),
        "backward_input_s": (given.backward_input_s, again, given.fetch_s),
        "backward_weight_s": (given.backward_weight_s,),
    }
    seconds = {
        name: [sum(of_stage) for of_stage in zip(*map(_floats, parts), strict=True)]
        for name, parts in by_stage.items()
    }
    travels = {edge: way.latency_s + way.lane_s for edge, way in edges.items()}
    busy = [0.0] * len(ranks)
    for (here, there), way in edges.items():
        busy[here] = max(busy[here], way.send_s + way.blocks * travels[here, there])
    unit = max(max(map(max, seconds.values())), 1e-300) / _PARTS
    return Costs(
        **{name: tuple(round(x / unit) for x in values) for name, values in seconds.items()},
        transfer_s={edge: round(x / unit) for edge, x in travels.items()},
        send_s=tuple(round(x / unit) for x in busy),
    )


def _floats(given: object) -> tuple[float, ...]:
    assert isinstance(given, tuple), "a prediction has one number for each stage"
    return given
