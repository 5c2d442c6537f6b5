"""Search for stages on sub-meshes of a cluster: which layers each has, on how many devices.

Alpa's inter-operator dynamic program (Zheng et al., OSDI 2022, section 5), and a wider one:

    layers   0 ─ 1 ─ 2 │ 3 ─ 4 │ 5 ─ 6 ─ 7 ─ 8
    mesh       1 x 3   │ 1 x 1 │     2 x 4           of three hosts with 4 devices each

    seconds of a step = sum of all t_i + (B - 1) x the greatest t_j       B micro-batches

For a bound t_max on the greatest t_j, the least sum is computed from the last layer on:

    F(s, k, d) = min over the end i and the mesh m of   t(k, i, m) + F(s - 1, i, d - m)

with s stages from layer k on and d devices left of each kind of host.  A stage needs
t(k, i, m) <= t_max, and memory for the s micro-batches that 1F1B has in flight there.

F does not grow with t_max, so for t_max in [a, b] no answer takes less than (B - 1) a + F(b).  The
paper tries bounds in ascending order until B x t_max reaches the best answer.  Here an interval
without a better answer is skipped, and any other is halved: the same answer, after tens of bounds
instead of thousands.
"""

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from heapq import heappop, heappush
from itertools import accumulate, count, islice, pairwise
from math import inf
from typing import Any, NamedTuple

import numpy as np

from penstock.errors import ConfigError, PlanError
from penstock.trace.units import bytes_text

from .stage_table import Hosts, Numbers, Stage, StageTable, Submesh, Task

MOST_STAGES = 64
"""The most stages of an answer."""
_LONGEST_S = sys.float_info.max
"""The greatest finite seconds."""


def submeshes(hosts: Sequence[Hosts]) -> list[Submesh]:
    """Return the meshes that a stage may have: any part of a host, and any number of hosts."""
    meshes = []
    for kind, (num_hosts, most, _) in enumerate(hosts):
        meshes += [Submesh(kind, 1, size) for size in range(1, most + 1)]
        meshes += [Submesh(kind, number, most) for number in range(2, num_hosts + 1)]
    return meshes


@dataclass(frozen=True, slots=True)
class Answer:
    """Stages, the seconds of a step by the search's formula, and the devices of each stage."""

    stages: tuple[Stage, ...]
    seconds: float
    devices: tuple[tuple[int, ...], ...]


def find_stages(
    task: Task, *, most: int = 8, eps: float = 0.01, ahead: int = 1, limit_s: float = inf
) -> list[Answer]:
    """Return at most `most` answers, best first, none slower than `limit_s`.

    A mesh has some devices of one host or several whole hosts, of any kind; devices may stay
    unused.  Kinds of hosts come in any order, and one host is filled before the next.

    A stage is `ahead` micro-batches ahead of the next: 1 in 1F1B, 2 in eager 1F1B.  The first of s
    stages keeps (s - 1) ahead + 1 micro-batches, at most B, and so many are on the way to the next
    stage and back at a time.

    Each answer takes at most a share `eps` longer than the optimum in its place; 0 is exact.
    There are at most `MOST_STAGES` stages.  A hundred layers on 1,000 devices take seconds, 48
    layers on 128 devices of each of two kinds most of a minute, as every pair of numbers left is a
    state.

    Raises:
        ConfigError: a number is not positive.
        PlanError: nothing fits, and there is no limit; says what is missing.
    """
    if most < 1 or eps < 0:
        raise ConfigError(f"most={most} and eps={eps}; ask for at least 1, and at least 0")
    return _Search(task, most, eps, ahead, limit_s).answers()


class _State(NamedTuple):
    """The first stages, their sum of seconds, and the numbers of stages and devices left."""

    sum_s: float
    stages: tuple[Stage, ...]
    num_left: int
    devices: tuple[int, ...]

    @property
    def start(self) -> int:
        return self.stages[-1].end if self.stages else 0


class _Search:
    """The search over bounds on the slowest stage, with the best answers so far."""

    def __init__(self, task: Task, most: int, eps: float, ahead: int, limit_s: float) -> None:
        numbers = [task.num_layers, task.num_microbatches, len(task.hosts), ahead]
        numbers += [number for host in task.hosts for number in host[:2]]
        if min(numbers) < 1:
            raise ConfigError(
                f"{task.num_layers} layers, {task.num_microbatches} micro-batches, ahead={ahead} "
                f"and hosts {list(task.hosts)}; give at least 1 of each"
            )
        self.task, self.most = task, most
        self.close = math.sqrt(1 + eps)
        """Factor within which bounds count as one, and again by which an answer may be missed."""
        self.devices = tuple(host.num_hosts * host.num_devices for host in task.hosts)
        num_stages = min(task.num_layers, sum(self.devices), MOST_STAGES)
        self.table = StageTable(task, submeshes(task.hosts), num_stages, ahead)
        self.meshes = self.table.meshes
        self.answer_of: dict[tuple[Stage, ...], Answer] = {}
        self.best_s = self.worst_s = limit_s

    def answers(self) -> list[Answer]:
        """Return the best answers, best first."""
        self._search()
        if not self.answer_of and self.worst_s == inf:
            raise PlanError(self._missing())
        return self._best()

    def _best(self) -> list[Answer]:
        return sorted(self.answer_of.values(), key=lambda answer: answer.seconds)[: self.most]

    # -- bounds on the slowest stage ------------------------------------------------------------

    def _search(self) -> None:
        """Put the best answers into `answer_of`."""
        # 1. Group close paces into bounds: the least and the greatest of each group.
        most_s = self.worst_s / max(self.task.num_microbatches - 1, 1)
        paces = np.unique(self.table.pace[self.table.pace < most_s])
        self.bounds: list[tuple[float, float]] = []
        at = 0
        while at < len(paces):
            end = int(np.searchsorted(paces, paces[at] * self.close, side="right"))
            self.bounds.append((float(paces[at]), float(paces[end - 1])))
            at = end
        # 2. Find the first bound for which there are enough devices.
        low = self._first_enough()
        # 3. Try bounds at growing distances, until the best answer gets no better.
        tried, step = [(low - 1, 0.0)], 1
        is_better = True
        while low < len(self.bounds) and (is_better or len(self.answer_of) < self.most):
            best = self.best_s
            tried.append((low, self._try(low)))
            is_better = self.best_s < best
            low, step = low + step, step * 2
        # 4. Explore the intervals between them, from the least sum within their upper end.
        least_sum = self.table.before(self.table.total)[0][-1]
        tried.append((len(self.bounds), float(least_sum)))
        for (before, _), (after, sum_s) in pairwise(tried):
            self._explore(before + 1, after - 1, sum_s)

    def _first_enough(self) -> int:
        """Return the first bound for which there are enough devices; most often there is none."""
        high = len(self.bounds)
        low = 0 if high and self._is_enough(high - 1) else high
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self._is_enough(middle) else (middle + 1, high)
        return low

    def _is_enough(self, bound: int) -> bool:
        return self.table.num_needed(self.bounds[bound][1]) <= sum(self.devices)

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
        return self.worst_s / self.close - (self.task.num_microbatches - 1) * self.bounds[bound][0]

    def _try(self, bound: int) -> float:
        """Put the best answers within a bound into `answer_of`.

        Return a lower bound on the sums of all other answers within this bound, and so within
        lower ones.
        """
        limit = self._limit(bound)
        total = self.table.within(self.bounds[bound][1])
        least = self.table.least_seconds(total, limit)
        self.reached_s = limit
        for stages in islice(self._in_order(least, total, limit), self.most):
            at = [(self.meshes.index(mesh), end, start) for start, end, mesh in stages]
            slowest = max(float(self.table.pace[place]) for place in at)
            sum_s = sum(float(self.table.total[place]) for place in at)
            seconds = sum_s + (self.task.num_microbatches - 1) * slowest
            self.answer_of[stages] = Answer(stages, seconds, self._devices_of(stages))
        best = self._best()
        if best:
            self.best_s = best[0].seconds
        if len(best) == self.most:
            self.worst_s = best[-1].seconds
        return self.reached_s

    def _in_order(
        self, least: Numbers, total: Numbers, limit: float
    ) -> Iterator[tuple[Stage, ...]]:
        """Yield answers, the least sum first, by a best-first search: the sum so far plus F is the
        exact least sum of any completion.
        """
        number, next_meshes = count(), cache(self._next_meshes)
        heap: list[tuple[float, int, _State, Iterator[tuple[float, _State]]]] = []

        def put_next(states: Iterator[tuple[float, _State]]) -> None:
            for sum_s, state in islice(states, 1):
                heappush(heap, (sum_s, next(number), state, states))

        # Begin with each number of stages that is possible.
        of_each_number: Any = (0, slice(None), *self.devices)
        sums = enumerate(least[of_each_number].tolist())
        begun = sorted((sum_s, n) for n, sum_s in sums if sum_s <= min(limit, _LONGEST_S))
        put_next((sum_s, _State(0.0, (), n, self.devices)) for sum_s, n in begun)
        while heap:
            self.reached_s, _, state, siblings = heappop(heap)
            # The heap holds one of a row of siblings at a time; the next one follows it.
            put_next(siblings)
            if state.num_left:
                put_next(self._continued(state, next_meshes(state.devices), least, total, limit))
            else:
                yield state.stages
        self.reached_s = limit

    def _next_meshes(self, devices: tuple[int, ...]) -> tuple[Numbers, Numbers]:
        """Return the meshes that the next stage may have, and the devices that each leaves."""
        room = np.array(devices) - self.table.sizes
        at: Any = (slice(None), *devices)
        meshes = np.flatnonzero((room >= 0).all(axis=1) & self.table.may_be_next[at])
        return meshes, room[meshes]

    def _continued(
        self, state: _State, onto: Sequence[Numbers], least: Numbers, total: Numbers, limit: float
    ) -> Iterator[tuple[float, _State]]:
        """Yield states with one more stage, on the meshes of `onto`, the least sums first."""
        (meshes, room), start = onto, state.start
        after = slice(start + 1, None)
        rest = least[after, state.num_left - 1][(slice(None), *room.T)].T
        stage_s = total[meshes, after, start]
        may_be_first = self.table.deepest[meshes, after, start] >= state.num_left
        stage_s = np.where(may_be_first, stage_s, inf)
        sums = (state.sum_s + stage_s + rest).ravel()
        for at in np.argsort(sums, kind="stable"):
            if not sums[at] <= min(limit, _LONGEST_S):
                return
            which, further = divmod(int(at), rest.shape[1])
            mesh, end = meshes[which], start + 1 + further
            stages = (*state.stages, Stage(start, end, self.meshes[mesh]))
            left = tuple(room[which].tolist())
            sum_s = state.sum_s + float(stage_s[which, further])
            yield float(sums[at]), _State(sum_s, stages, state.num_left - 1, left)

    def _devices_of(self, stages: tuple[Stage, ...]) -> tuple[tuple[int, ...], ...]:
        """Return the devices of each stage: the next unused ones of its kind."""
        firsts, devices = [*accumulate(self.devices, initial=0)], []
        for stage in stages:
            kind, first = stage.submesh.kind, firsts[stage.submesh.kind]
            firsts[kind] += stage.submesh.size
            devices.append(tuple(range(first, firsts[kind])))
        return tuple(devices)

    def _missing(self) -> str:
        """Return why there is no answer."""
        most = self.table.least_excess()
        if most == inf:
            return "no stages are on these hosts: no price was given for the meshes they need"
        return no_room(bytes_text(most))


def no_room(lack: str) -> str:
    """Return the words for stages of which the best lack bytes, so many in words."""
    return (
        f"no stages fit: those that need least lack {lack} on their fullest "
        "device; give more devices or memory, smaller micro-batches, or recompute"
    )
