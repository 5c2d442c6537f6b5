"""The search that every plan comes from: which layers each stage has, and on which devices.

Alpa's objective (Zheng et al. 2022, section 5), for M micro-batches and stages of t_i seconds:

    sum of all t_i + (M - 1) x the greatest t_j          M -> infinity: the slowest stage alone

For a bound t_max on the greatest t_j, `stage_program` has the least sum F(t_max).  It does not
grow with t_max, so for t_max in [a, b] no answer takes less than (M - 1) a + F(b).  The paper
tries bounds in ascending order until M x t_max reaches the best answer.  Here an interval without
a better answer is skipped, and any other is halved: the same answer, after tens of bounds instead
of thousands.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import count, islice, pairwise
from math import inf, sqrt
from typing import Any, NamedTuple

import numpy as np

from .stage_program import Block, Matrix, Program, Stages

ROUNDING = 1e-9
"""Stages whose costs differ by less, as a share, are equally slow: sums of floats differ so."""
_LONGEST_S = sys.float_info.max
"""The greatest finite seconds."""


class Part(NamedTuple):
    """A stage of an answer: the number of its mesh, and of the cuts where it starts and ends."""

    mesh: int
    start: int
    end: int


class _State(NamedTuple):
    """The first stages, their sum of seconds, and the numbers of stages and devices left."""

    sum_s: float
    parts: tuple[Part, ...]
    num_left: int
    devices: tuple[int, ...]

    @property
    def start(self) -> int:
        return self.parts[-1].end if self.parts else 0


class Within:
    """Answers whose stages keep to a bound, by the least sum of what is charged for them."""

    def __init__(
        self,
        stages: Stages,
        bound: float,
        *,
        limit: float = inf,
        charge: Callable[[Matrix], Matrix] = np.asarray,
    ) -> None:
        def cost(block: Block) -> Matrix:
            return np.where(block.pace <= bound, charge(block.total), inf)

        self._stages, self._most_s = stages, min(limit, _LONGEST_S)
        self._pass = Program(stages, cost, limit=limit)
        self._rows: dict[tuple[int, int], Matrix] = {}
        self._next_meshes: dict[tuple[int, ...], tuple[Matrix, Matrix]] = {}
        self.reached = self._limit = limit
        """No other answers than those that `best` returned have a lesser sum."""

    def best(self, most: int = 1) -> list[tuple[Part, ...]]:
        """Return at most so many answers within the limit, the least sums first."""
        if most > 1:
            return [*islice(self._in_order(), most)]
        # However many have the least sum: a search for several would look at all of them.
        for sum_s, number in self._pass.least[:1]:
            if sum_s <= self._most_s:
                self.reached, state = sum_s, _State(0.0, (), number, self._stages.devices)
                while state.num_left:
                    _, state = next(self._continued(state, _LONGEST_S))
                return [state.parts]
        return []

    def _in_order(self) -> Iterator[tuple[Part, ...]]:
        """Yield answers, the least sum first, by a best-first search: the sum so far plus F is the
        exact least sum of any completion.
        """
        number = count()
        heap: list[tuple[float, int, int, _State, Iterator[tuple[float, _State]]]] = []

        def put_next(states: Iterator[tuple[float, _State]]) -> None:
            for sum_s, state in islice(states, 1):  # of equal sums the one with fewer stages left
                heappush(heap, (sum_s, state.num_left, next(number), state, states))

        begun = ((s, n) for s, n in self._pass.least if s <= self._most_s)
        put_next((s, _State(0.0, (), n, self._stages.devices)) for s, n in begun)
        while heap:
            self.reached, _, _, state, siblings = heappop(heap)
            # The heap holds one of a row of siblings at a time; the next one follows it.
            put_next(siblings)
            if state.num_left:
                put_next(self._continued(state, self._most_s))
            else:
                yield state.parts
        self.reached = self._limit

    def _continued(self, state: _State, limit: float) -> Iterator[tuple[float, _State]]:
        """Yield states with one more stage, the least sums first."""
        after = slice(state.start + 1, None)
        meshes, room = self._after(state.devices)
        rest = self._pass.levels[state.num_left - 1][(after, *room.T)].reshape(-1, len(meshes)).T
        stage_s = self._row(state.num_left, state.start)[meshes, after]
        sums = (state.sum_s + stage_s + rest).ravel()
        for at in np.argsort(sums, kind="stable"):
            if not sums[at] <= limit:
                return
            which, further = divmod(int(at), rest.shape[1])
            part = Part(int(meshes[which]), state.start, state.start + 1 + further)
            left = tuple(room[which].tolist())
            sum_s = state.sum_s + float(stage_s[which, further])
            yield float(sums[at]), _State(sum_s, (*state.parts, part), state.num_left - 1, left)

    def _after(self, devices: tuple[int, ...]) -> tuple[Matrix, Matrix]:
        """Return the meshes that the next stage may have, and the devices that each leaves."""
        if devices not in self._next_meshes:
            stages = self._stages
            room = np.array(devices, dtype=int) - stages.sizes
            may = (room >= 0).all(axis=1)
            if stages.may_be_next is not None:
                at: Any = (slice(None), *devices)
                may &= stages.may_be_next[at]
            meshes = np.flatnonzero(may)
            self._next_meshes[devices] = meshes, room[meshes]
        return self._next_meshes[devices]

    def _row(self, left: int, start: int) -> Matrix:
        """Return the costs of stages from a start on as [mesh, end]."""
        if (left, start) not in self._rows:
            block = self._stages.block(left)
            found = np.full((len(self._stages.sizes), self._stages.num_cuts + 1), inf)
            at = slice(None), slice(None), start - block.start
            own = self._pass.costs_at(left, at)
            found[:, block.end : block.end + own.shape[1]] = own
            self._rows[left, start] = found
        return self._rows[left, start]


class Search:
    """The search over bounds on the slowest stage, with the best answers so far.

    At most `most` answers are kept, none slower than `limit_s`.  Each takes at most a share `eps`
    longer than the optimum in its place; 0 is exact.
    """

    def __init__(
        self, stages: Stages, num_microbatches: int, most: int, eps: float, limit_s: float = inf
    ) -> None:
        self.stages, self.most, self.later = stages, most, num_microbatches - 1
        self.close = sqrt(1 + eps)
        """Factor within which bounds count as one, and again by which an answer may be missed."""
        self.seconds_of: dict[tuple[Part, ...], float] = {}
        """The seconds of a step of each answer."""
        self.best_s = self.worst_s = limit_s

    @property
    def best(self) -> list[tuple[Part, ...]]:
        """The best answers, best first."""
        return sorted(self.seconds_of, key=lambda parts: self.seconds_of[parts])[: self.most]

    def run(self, slowest: float | None = None) -> None:
        """Find the best answers; `slowest` is that of the stages, if it is known."""
        # 1. What the slowest stage takes at least, and at most in an answer among the best.
        most_s, later = self.worst_s, max(self.later, 1)
        least_s = self.stages.slowest(most_s / later) if slowest is None else slowest
        least_sum = self._least_sum()
        if self.later:
            most_s = (most_s - least_sum) / later
        # 2. Group close paces between these into bounds: the least and the greatest of each group.
        every = (block.pace for block in self.stages.blocks if least_s < inf)
        known = [pace[(pace >= least_s) & (pace <= most_s)] for pace in every]
        paces = np.unique(np.concatenate(known or [np.empty(0)]))
        self.bounds: list[tuple[float, float]] = []
        at = 0
        while at < len(paces):
            end = int(np.searchsorted(paces, paces[at] * self.close, side="right"))
            self.bounds.append((float(paces[at]), float(paces[end - 1])))
            at = end
        # 3. Try bounds at growing distances, until the best answer gets no better.
        low, step, tried = 0, 1, [(-1, 0.0)]
        is_better = True
        while low < len(self.bounds) and (is_better or len(self.seconds_of) < self.most):
            best_s = self.best_s
            tried.append((low, self._try(low)))
            is_better = self.best_s < best_s
            low, step = low + step, step * 2
        # 4. Explore the intervals between them, from the least sum within their upper end.
        tried.append((len(self.bounds), least_sum))
        for (before, _), (after, sum_s) in pairwise(tried):
            self._explore(before + 1, after - 1, sum_s)

    def _explore(self, low: int, high: int, least_sum: float) -> None:
        """Try bounds from `low` to `high`, for which no sum is less than `least_sum`."""
        while low <= high and least_sum >= self._limit(high):
            high -= 1
        if low <= high:
            middle = (low + high) // 2
            self._explore(low, middle - 1, max(least_sum, self._try(middle)))
            self._explore(middle + 1, high, least_sum)

    def _limit(self, bound: int) -> float:
        """Return the sum of seconds above which no answer is among the best."""
        return self.worst_s / self.close - self.later * self.bounds[bound][0]

    def _try(self, bound: int) -> float:
        """Keep the best answers within a bound.

        Return a lower bound on the sums of all other answers within this bound, and so within
        lower ones.
        """
        limit = self._limit(bound)
        within = Within(self.stages, self.bounds[bound][1], limit=limit)
        for parts in within.best(self.most):
            self.keep(parts)
        return within.reached

    def keep(self, parts: tuple[Part, ...]) -> None:
        """Keep an answer among the best."""
        self.seconds_of[parts] = step_s(self.stages, parts, self.later)
        best = self.best
        self.best_s = self.seconds_of[best[0]]
        if len(best) == self.most:
            self.worst_s = self.seconds_of[best[-1]]

    def _least_sum(self) -> float:
        """Return a lower bound on the sum of an answer."""
        if not self.stages.is_exact:
            return float(self.stages.least_before(lambda block: block.total)[-1])
        return Program(self.stages, lambda block: block.total).least[0][0]


def step_s(stages: Stages, parts: Sequence[Part], later: float) -> float:
    """Return the seconds of a step by the formula, with so many micro-batches after the first."""
    sum_s = slowest_s = 0.0
    for left, (mesh, start, end) in zip(range(len(parts), 0, -1), parts, strict=True):
        block = stages.block(left)
        at = mesh, end - block.end, start - block.start
        sum_s += float(block.total[at])
        slowest_s = max(slowest_s, float(block.pace[at]))
    return sum_s + later * slowest_s
