"""List scheduling: a rank that is free begins the first, by a policy, of what could start.

What comes out is a run of the ranks under given costs and limits, so it ends, for any number of
stages, ranks and micro-batches: nothing is divided, and no rank waits for what cannot come.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from math import inf

from .costs import UNIT_COSTS, Costs
from .ir import Backward, BackwardInput, Forward, Schedule
from .laws import AtMostBytes
from .memory import Sizes
from .problem import (
    FORWARD,
    INPUT,
    WEIGHT,
    WHOLE,
    Answer,
    Problem,
    joined,
    least_bytes,
    length,
    problem_of,
    schedule_of,
)

Step = tuple[bool, int, int]
"""(is a backward, stage, micro-batch): a forward, or the backward of its inputs."""
Priority = Callable[[bool, int, int], tuple[float, ...]]
"""What a step is compared by: the least begins first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What a free rank begins with.

    Of the steps that could start, that of the least `priority` begins.  `ahead[stage]` is the most
    forwards whose backward has not begun.  With `orders`, each rank takes its steps in that order
    instead.

    Stages in `whole` have backwards in one part.  The weights' part of a backward begins only
    where no step could, the oldest first, and if no step is known to come in before `patience`
    of its time has passed.
    """

    priority: Priority = lambda is_backward, stage, microbatch: ()
    ahead: Sequence[int] = ()
    orders: Sequence[Sequence[Step]] | None = None
    whole: frozenset[int] = frozenset()
    patience: float = 0


def order_of(schedule: Schedule) -> list[list[Step]]:
    """Return the order of forwards and backwards on each rank, for `Policy.orders`."""
    return [
        [
            (not isinstance(x, Forward), x.stage, x.microbatch)
            for x in program
            if isinstance(x, Forward | Backward | BackwardInput)
        ]
        for program in schedule.programs
    ]


def best_of(
    policies: Iterable[Policy],
    ranks: Sequence[int],
    num_microbatches: int,
    costs: Costs | None,
    *most_live: int,
) -> Schedule:
    """Return the shortest schedule of these policies under `costs`, UNIT_COSTS if there are none.

    `ranks[stage]` is who runs a stage.  Each of `most_live` is tried: no rank then has more
    forwards whose backward, or its weights' part, has not ended.

    Raises:
        ConfigError: `costs` are those of another number of stages.
    """
    policies, found = tuple(policies), []
    for limit in most_live:
        memory = AtMostBytes(Sizes(kept_bytes=1), limit)
        problem = problem_of(costs or UNIT_COSTS, memory, tuple(ranks), num_microbatches, ())
        found += [made for policy in policies if (made := built(problem, policy))]
    return schedule_of(problem, joined(problem, min(found, key=partial(length, problem))))


def built(problem: Problem, policy: Policy) -> Answer | None:
    """Return what ranks do that follow `policy`; None if an order in it makes them wait for ever.

    A rank leaves bytes for one micro-batch to go on through its later stages and back, which alone
    could free what the earlier ones keep; with an order, it does not.
    """
    run = _Run(problem, policy)
    run.to_the_end()
    return run.answer if min(run.begun[True]) == problem.num_microbatches else None


class _Run:
    """The ranks on their way through a step."""

    def __init__(self, problem: Problem, policy: Policy) -> None:
        self.p = p = problem
        self.policy = policy
        k, m, ranks = p.num_stages, p.num_microbatches, range(len(p.stages))
        self.ahead = policy.ahead or [m] * k
        # [kind][stage]: seconds, and the most that a rank may keep for one to begin
        self.time, self.room = p.times(), self._room()
        # [is a backward][stage]: its recompute, and how long what it needs is on its way
        self.redo, self.lag = (
            [[values[p.op(kind, s, 0)] for s in range(k)] for kind in (FORWARD, INPUT)]
            for values in (p.redo, p.lag)
        )
        # [is a backward][stage][micro-batch]: when it or its recompute can begin
        self.ready = [[[inf] * m for _ in range(k)] for _ in (False, True)]
        self.ready[False][0] = [0] * m
        # [is a backward][stage]: how many have begun; each stage takes micro-batches in order
        self.begun = [[0] * k for _ in (False, True)]
        # [rank]: the (stage, micro-batch) of weights' parts still to run
        self.left: list[deque[tuple[int, int]]] = [deque() for _ in ranks]
        self.live = [0 for _ in ranks]
        self.free: list[float] = [0 for _ in ranks]
        self.answer: Answer = [[] for _ in ranks]
        # (when, whom) to look again
        self.calls: list[tuple[float, int]] = [(0, rank) for rank in ranks]

    def _room(self) -> list[list[float]]:
        p, limits = self.p, self.p.limits or [inf] * len(self.p.stages)
        room = [
            [limits[rank] - p.peak[p.op(kind, s, 0)] for s, rank in enumerate(p.ranks)]
            for kind in range(4)
        ]
        for stage in self.policy.whole:
            room[INPUT][stage] = room[WHOLE][stage]
        if self.policy.orders is None:
            for rank, stages in enumerate(p.stages):
                for place, s in enumerate(stages):
                    room[FORWARD][s] = limits[rank] - least_bytes(p, stages[place:])
        return room

    def to_the_end(self) -> None:
        """Run everything."""
        calls, free = self.calls, self.free
        while calls:
            now, rank = heappop(calls)
            if free[rank] > now:
                continue
            step, soonest = self._next(rank, now)
            if step is not None:
                self._begin(rank, *step, now)
            elif self.left[rank]:
                self._fill(rank, now, soonest)

    def _next(self, rank: int, now: float) -> tuple[Step | None, float]:
        """Return the step that begins, if any, and when the next one can whose time is known."""
        best, least, soonest = None, None, inf
        for step in self._allowed(rank):
            is_backward, stage, microbatch = step
            at = self.ready[is_backward][stage][microbatch]
            if at > now:
                if at < soonest:
                    soonest = at
            elif best is None:
                best = step
            else:
                least = least or self.policy.priority(*best)
                key = self.policy.priority(*step)
                if key < least:
                    best, least = step, key
        return best, soonest

    def _allowed(self, rank: int) -> list[Step]:
        """List the steps that order and memory let come next, whether they are ready or not."""
        live, may_begin, may_give = self.live[rank], self.room[FORWARD], self.room[INPUT]
        forwards, backwards = self.begun
        if self.policy.orders is not None:
            done = sum(forwards[s] + backwards[s] for s in self.p.stages[rank])
            order = self.policy.orders[rank]
            if done == len(order) or not (order[done][0] or live <= may_begin[order[done][1]]):
                return []
            return [order[done]]
        found: list[Step] = []
        m, ahead = self.p.num_microbatches, self.ahead
        for stage in self.p.stages[rank]:
            number, backward = forwards[stage], backwards[stage]
            if number < m and live <= may_begin[stage] and number - backward < ahead[stage]:
                found.append((False, stage, number))
            if backward < number and (live <= may_give[stage] or self._may_be_whole(rank, stage)):
                found.append((True, stage, backward))
        return found

    def _may_be_whole(self, rank: int, stage: int) -> bool:
        """Tell whether bytes and earlier weights' parts allow a backward in one part."""
        fits = self.live[rank] <= self.room[WHOLE][stage]
        return fits and stage not in dict(self.left[rank])

    def _begin(
        self, rank: int, is_backward: bool, stage: int, microbatch: int, now: float
    ) -> None:
        p, redo, ready = self.p, self.redo[is_backward], self.ready[is_backward]
        kind = FORWARD
        if is_backward:
            divides = stage not in self.policy.whole and self.live[rank] <= self.room[INPUT][stage]
            kind = INPUT if divides else WHOLE
            if divides:
                self.left[rank].append((stage, microbatch))
        if redo[stage]:
            given = ready[stage][microbatch] + redo[stage]
            if self.answer[rank][-1] != p.op(FORWARD, stage, microbatch):
                now += redo[stage]
            now = max(now, given)
        self.begun[is_backward][stage] += 1
        end = self._do(rank, kind, stage, microbatch, now)
        target = stage - 1 if is_backward else stage + 1
        if target == p.num_stages:  # the loss: its gradient is there at once
            self.ready[True][stage][microbatch] = end - self.redo[True][stage]
        elif target >= 0:
            at = end + self.lag[is_backward][target] - redo[target]
            ready[target][microbatch] = at
            other, look = p.ranks[target], max(at, end)
            if look >= self.free[other]:
                heappush(self.calls, (look, other))

    def _fill(self, rank: int, now: float, soonest: float) -> None:
        stage, microbatch = self.left[rank][0]
        if soonest < now + self.policy.patience * self.time[WEIGHT][stage]:
            return  # what comes in calls the rank again
        self.left[rank].popleft()
        self._do(rank, WEIGHT, stage, microbatch, now)

    def _do(self, rank: int, kind: int, stage: int, microbatch: int, now: float) -> float:
        p = self.p
        op = (kind * p.num_stages + stage) * p.num_microbatches + microbatch
        end = now + self.time[kind][stage]
        self.answer[rank].append(op)
        self.live[rank] += p.change[op]
        self.free[rank] = end
        heappush(self.calls, (end, rank))
        return end
