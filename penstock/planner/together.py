"""Choose the partition, the placement and the schedule of a plan together.

A local search tries small changes, simulates the step, and keeps a change that makes it faster:

    partition   [ 3 | 2 | 4 ]  ─►  [ 2 | 3 | 4 ]     a layer moves to the next stage
    placement   (0, 1, 2, 1)   ─►  (0, 1, 2, 0)      a stage moves to another rank
    schedule    is made anew for the costs of the stages, by `critical_path`
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
"""Costs and bytes in a schedule's arguments are rounded to this many parts of the largest."""
_BALANCED = 200
"""The most changes of a cut by the lower bound alone, before its first schedule is made."""


@dataclass(frozen=True, slots=True)
class Cut:
    """The number of layer spans of each stage, and its rank."""

    spans: tuple[int, ...]
    ranks: tuple[int, ...]


class Tuner:
    """A local search for a faster plan of a size; it simulates at most `left` plans."""

    def __init__(self, evaluator: Evaluator, size: Size, most_on_rank: int, left: int) -> None:
        self.evaluator, self.size = evaluator, size
        self.most_on_rank, self.left = most_on_rank, left
        self._best_s = inf
        self._best: tuple[Size, Prediction] | None = None
        self._tried: set[Cut] = set()

    def run(self, start: Prediction) -> tuple[Size, Prediction] | None:
        """Return the size and the plan of the fastest cut; None if none is faster than `start`.

        From each of several first cuts, the fastest first, it moves to a faster neighbour until
        there is none.
        """
        self._best_s = start.quick_step_s
        starts = [(self._step_s(cut), cut) for cut in dict.fromkeys(self._starts(start))]
        for first_s, first in sorted(starts, key=lambda pair: pair[0]):
            faster: tuple[float, Cut] | None = (first_s, first)
            while faster is not None:
                at_s, at = faster
                neighbours = sorted(self._neighbours(at), key=self.bound_s)
                steps = ((self._step_s(cut), cut) for cut in neighbours if cut not in self._tried)
                faster = next((step for step in steps if step[0] < at_s), None)
        return self._best

    def _step_s(self, cut: Cut) -> float:
        """Return the seconds of a cut's plan, and keep the plan if it is the fastest.

        They are infinite if it does not fit, cannot be the fastest, or no plans are left to make.
        """
        if not self.left or self.bound_s(cut) >= self._best_s:
            return inf
        self._tried.add(cut)
        self.left -= 1
        predicted, size = self._predicted(cut), self._size(cut)
        if predicted is None or not self.evaluator.fits(size, predicted):
            return inf
        took_s = predicted.quick_step_s
        if took_s < self._best_s:
            self._best_s, self._best = took_s, (size, predicted)
        return took_s

    def bound_s(self, cut: Cut) -> float:
        """Return a lower bound on the step of a cut, for any schedule."""
        return max(self._rank_s(cut))

    def _rank_s(self, cut: Cut) -> list[float]:
        """Return a lower bound on the seconds at which each rank ends."""
        loads = []
        for rank, (start, end) in zip(cut.ranks, runs_of(cut.spans), strict=True):
            forward_s, back_s, busy_s = (upto[end] - upto[start] for upto in self._upto[rank])
            loads.append(Load(rank, forward_s, back_s, forward_s + back_s, busy_s))
        ends_s = rank_ends_s(loads, self.size.num_microbatches)
        return [ends_s.get(rank, 0.0) for rank in range(self.size.num_ranks)]

    @cached_property
    def _upto(self) -> list[list[list[float]]]:
        """For each rank, three lists of seconds of all spans before each, on its device.

        They are those of forwards, of the shortest backwards that other stages wait for, and of
        all work.
        """
        spans, sums = self.evaluator.profile.spans, []
        for place in self.evaluator.places_of(self.size)[: self.size.num_ranks]:
            layers = [
                (
                    x.forward_s,
                    min(x.backward_s, x.input_s),
                    x.forward_s + min(x.backward_s, x.input_s + x.weight_s),
                )
                for x in self.evaluator.layers_at(self.size, place)
            ]
            sums.append(
                [
                    [*accumulate((sum(values[a:b]) for a, b in spans), initial=0.0)]
                    for values in zip(*layers, strict=True)
                ]
            )
        return sums

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
        """Yield the ranks of stages: a chain, two rounds, a V, a ring, and Vs without ends."""
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
        """Return a cut whose ranks have about equal work, by the lower bound alone."""
        # 1. Cut so that each rank's work is about equal, on the first rank's device.
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
        # 2. Improve it by single changes, on each rank's own device.
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
        """Return the faster of two schedules, or None if neither fits.

        One is made without a limit of memory, so that layers may have to be recomputed; the other
        keeps to the memory of the ranks.
        """
        spans = self.evaluator.profile.spans
        edges = [0, *(spans[end - 1][1] for end in accumulate(cut.spans))]
        partition = tuple(b - a for a, b in pairwise(edges))
        evaluator, size = self.evaluator, self._size(cut)
        draft = evaluator.draft(size, critical_path(ranks=cut.ranks), partition)
        costs = relative(self.evaluator.predicted(draft))
        free = evaluator.plan_at(size, critical_path(costs, cut.ranks), partition)
        if free is not None and not free.recomputing:
            return self.evaluator.predicted(free)
        memory = self._room(cut, partition)
        within = critical_path(costs, cut.ranks, memory)
        lean = memory and evaluator.plan_at(size, within, partition)
        both = [self.evaluator.predicted(x) for x in (free, lean) if isinstance(x, Plan)]
        return min(both, key=lambda x: x.quick_step_s, default=None)

    def _room(self, cut: Cut, partition: tuple[int, ...]) -> AtMostBytes | None:
        """Return the memory of ranks beside weights, in parts of the largest; None: too little."""
        # 1. Subtract the weights from the memory of each rank, and compare with one micro-batch.
        size, num_stages = self._size(cut), len(partition)
        prices = self.evaluator.prices(size, critical_path(ranks=cut.ranks), None)
        of_stages = prices.of_stages.kept_by(partition, (Recompute.NEVER,) * num_stages)
        limits, needed = [*self.evaluator.limits_of(size)], [0] * size.num_ranks
        stages = zip(cut.ranks, runs_of(partition), of_stages, strict=True)
        for rank, (start, end), stage_bytes in stages:
            limits[rank] -= sum(prices.lasting[start:end])
            needed[rank] += max(stage_bytes.graph, stage_bytes.weights)
        if any(map(le, limits, needed)):
            return None
        # 2. Round bytes up and limits down to parts, so that what fits in parts fits in bytes.
        unit = max(limits) / _PARTS
        graphs, weights = (
            tuple(ceil(getattr(stage_bytes, name) / unit) for stage_bytes in of_stages)
            for name in ("graph", "weights")
        )
        sizes = Sizes(kept_bytes=graphs, weight_bytes=weights)
        memory = AtMostBytes(sizes, tuple(int(limit / unit) for limit in limits))
        # 3. Rounding may leave too little for one micro-batch.
        least = Counter[int]()
        for rank, graph, left in zip(cut.ranks, graphs, weights, strict=True):
            least[rank] += max(graph, left)
        is_enough = all(least[r] <= limit for r, limit in enumerate(memory.limits(size.num_ranks)))
        return memory if is_enough else None


def relative(predicted: Prediction) -> Costs:
    """Return the costs for a list schedule, in parts of the largest: stages and messages.

    Forwards include offload, backwards fetch and recompute.  Whole numbers of parts make equal
    plans have equal schedules.
    """
    costs, ranks = predicted.costs, predicted.plan.placement.places
    again = costs.again(len(ranks))
    edges = {
        (s, s + 1): predicted.sharing.way_of((False, s, s + 1))
        for s, (here, there) in enumerate(pairwise(ranks))
        if here != there
    }
    # 1. Add up the seconds of each kind of instruction, by stage.
    by_stage = {
        "forward_s": (costs.forward_s, costs.offload_s),
        "backward_s": (costs.backward_s, again, costs.fetch_s),
        "backward_input_s": (costs.backward_input_s, again, costs.fetch_s),
        "backward_weight_s": (costs.backward_weight_s,),
    }
    seconds = {
        name: [sum(of_stage) for of_stage in zip(*map(_of_stages, parts), strict=True)]
        for name, parts in by_stage.items()
    }
    # 2. Messages: their travel, and how long they keep the sender from computing.
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


def _of_stages(seconds: object) -> tuple[float, ...]:
    assert isinstance(seconds, tuple), "a prediction has one number for each stage"
    return seconds
