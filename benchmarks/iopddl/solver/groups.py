"""Make the problem smaller without losing an optimum: remove options, merge nodes into groups.

prune     an option goes when a neighbour has no option that may stand beside it
merge     a node whose option follows from a neighbour's becomes a part of that neighbour
"""

import math
from collections import deque
from collections.abc import Iterator

import numpy
from numpy.typing import NDArray

from penstock.errors import PlanError

from .problem import Numbers, Problem

Indices = NDArray[numpy.int64]


class Graph:
    """Groups of nodes, each chosen as one, and what pairs of groups cost.

    A group is numbered as one of its nodes. `members[k]` has the nodes of group k, each with its
    option in each state of the group; `pairs[k][j]` is by states of k, then of j.
    """

    def __init__(self, problem: Problem) -> None:
        self.costs = [numpy.asarray(c, float) for c in problem.costs]
        self.members: dict[int, list[tuple[int, Indices]]] = {}
        self._is_part = [False] * len(self.costs)
        self._parts: list[list[tuple[int, Indices]]] = [[] for _ in self.costs]
        self._option: list[Indices] = [numpy.arange(len(c)) for c in self.costs]
        self.pairs: list[dict[int, Numbers]] = [{} for _ in self.costs]
        for a, b, costs in problem.edges:
            if a == b:
                self.costs[a] = self.costs[a] + numpy.diagonal(costs)
            else:
                self._add(a, b, numpy.asarray(costs, float))
        self._prune()
        self._merge()

    def _add(self, a: int, b: int, costs: Numbers) -> None:
        if b in self.pairs[a]:
            costs = costs + self.pairs[a][b]
        self.pairs[a][b], self.pairs[b][a] = costs, costs.T

    def _keep(self, k: int, kept: NDArray[numpy.bool_]) -> None:
        self.costs[k], self._option[k] = self.costs[k][kept], self._option[k][kept]
        self._parts[k] = [(part, of[kept]) for part, of in self._parts[k]]
        if not len(self.costs[k]):
            raise PlanError(
                f"node {k} has no option that its neighbours allow: "
                "the forbidden pairs leave nothing to choose; allow more of them"
            )
        for j, costs in self.pairs[k].items():
            self.pairs[k][j] = costs[kept]
            self.pairs[j][k] = self.pairs[k][j].T

    def _prune(self) -> None:
        is_waiting = [not is_part for is_part in self._is_part]
        waiting = deque(k for k, is_alone in enumerate(is_waiting) if is_alone)
        while waiting:
            k = waiting.popleft()
            is_waiting[k] = False
            kept = numpy.isfinite(self.costs[k])
            for costs in self.pairs[k].values():
                kept &= costs.min(axis=1) < math.inf
            if kept.all():
                continue
            self._keep(k, kept)
            for j in self.pairs[k]:
                if not is_waiting[j]:
                    is_waiting[j] = True
                    waiting.append(j)

    def _merge(self) -> None:
        """Make k a part of j where each state of j leaves k one state."""
        waiting = deque((j, k) for k, pairs in enumerate(self.pairs) for j in pairs)
        while waiting:
            j, k = waiting.popleft()
            costs = self.pairs[j].get(k)
            if costs is None or numpy.isfinite(costs).sum(axis=1).max() > 1:
                continue
            of = costs.argmin(axis=1)
            if len(of) == len(self.costs[k]) and len(self.pairs[j]) < len(self.pairs[k]):
                continue  # each determines the other: the other direction moves fewer pairs
            self.costs[j] = self.costs[j] + costs[numpy.arange(len(of)), of] + self.costs[k][of]
            self._parts[j].append((k, of))
            self._is_part[k] = True
            moved, self.pairs[k] = self.pairs[k], {}
            for other, theirs in moved.items():
                del self.pairs[other][k]
                if other != j:
                    self._add(j, other, theirs[of])
                    waiting += ((j, other), (other, j))
        self._prune()
        self.members = {
            k: list(self._inside(k)) for k, is_part in enumerate(self._is_part) if not is_part
        }

    def _inside(self, group: int) -> Iterator[tuple[int, Indices]]:
        """Yield the nodes that are parts of a group, with their option in each of its states."""
        waiting = [(group, numpy.arange(len(self.costs[group])))]
        while waiting:
            k, states = waiting.pop()
            yield k, self._option[k][states]
            waiting += ((part, of[states]) for part, of in self._parts[k])


class Memory:
    """What states of groups use at the times when the most may be used: where a node begins.

    States of all groups are numbered in one row, `states[k]` are those of group k.
    """

    def __init__(self, problem: Problem, graph: Graph) -> None:
        self.num_states = 0
        self.states: dict[int, slice] = {}
        for k in graph.members:
            self.states[k] = slice(self.num_states, self.num_states + len(graph.costs[k]))
            self.num_states = self.states[k].stop
        self.limit = problem.limit
        states, usages, starts, ends = [], [], [], []
        is_limited = bool(problem.usages) and problem.limit < math.inf
        for k, members in graph.members.items() if is_limited else ():
            for i, option in members:
                if problem.alive[i][0] < problem.alive[i][1]:
                    states.append(self.states[k].start + numpy.arange(len(option)))
                    usages.append(numpy.asarray(problem.usages[i], float)[option])
                    starts.append(numpy.full(len(option), problem.alive[i][0]))
                    ends.append(numpy.full(len(option), problem.alive[i][1]))
        self._state, self._usage, start, end = (
            numpy.concatenate(x) if x else numpy.zeros(0, int)
            for x in (states, usages, starts, ends)
        )
        self.times = numpy.unique(start)
        self._start = numpy.searchsorted(self.times, start)
        self._end = numpy.searchsorted(self.times, end)

    def used(self, weights: Numbers) -> Numbers:
        """Return what is used at each time, where a state counts as often as its weight says."""
        used, count = self._usage * weights[self._state], len(self.times) + 1
        changes = numpy.bincount(self._start, used, count) - numpy.bincount(self._end, used, count)
        return numpy.cumsum(changes)[:-1]

    def priced(self, prices: Numbers) -> Numbers:
        """Return for each state the sum over all times of price times usage."""
        until = numpy.concatenate(([0.0], numpy.cumsum(prices)))
        spent = self._usage * (until[self._end] - until[self._start])
        return numpy.bincount(self._state, spent, self.num_states).astype(float)

    def row(self, time: int) -> Numbers:
        """Return for each state what it uses at one time."""
        alive = (self._start <= time) & (time < self._end)
        used = numpy.bincount(self._state[alive], self._usage[alive], self.num_states)
        return used.astype(float)
