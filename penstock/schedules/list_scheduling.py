"""List scheduling: a free rank begins, of the steps that could start, the first by a policy.

The result is a run of the ranks under given costs and limits.  So it ends, for any number of
stages, ranks and micro-batches.
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
"""(is a backward, stage, micro-batch) -> the key of a step: the least begins first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The rules by which a free rank chooses its next instruction.

    It begins a step that is ready.  If none is, it begins the oldest weights' part.
    """

    priority: Priority = lambda is_backward, stage, microbatch: ()
    """The order among steps that could start."""
    ahead: Sequence[int] = ()
    """The most forwards of each stage whose backward has not begun; empty: no limit."""
    orders: Sequence[Sequence[Step]] | None = None
    """The fixed order of each rank's steps, instead of `priority` and `ahead`."""
    whole: frozenset[int] = frozenset()
    """The stages with backwards in one part."""
    patience: float = 0
    """A weights' part waits if a step is known to become ready within this share of its time."""


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

    `ranks[stage]` is the rank that runs a stage.  Each of `most_live` is tried as a limit of the
    micro-batches in flight on a rank, counted on each of its stages.
    """
    policies, answers = tuple(policies), []
    for limit in most_live:
        memory = AtMostBytes(Sizes(kept_bytes=1), limit)
        problem = problem_of(costs or UNIT_COSTS, memory, tuple(ranks), num_microbatches, ())
        answers += [answer for policy in policies if (answer := built(problem, policy))]
    return schedule_of(problem, joined(problem, min(answers, key=partial(length, problem))))


def built(problem: Problem, policy: Policy) -> Answer | None:
    """Run the ranks by `policy` and return their operations; None if its order deadlocks.

    Without an order, a rank keeps bytes free for one micro-batch to pass its later stages and come
    back.  Only that could free the bytes of its earlier stages.
    """
    run = _Run(problem, policy)
    calls, free = run.calls, run.free
    while calls:
        now, rank = heappop(calls)
        if free[rank] > now:
            continue
        step, soonest = run.next_step(rank, now)
        if step is not None:
            run.begin(rank, *step, now)
        elif run.left[rank]:
            stage, microbatch = run.left[rank][0]
            # a step that comes in soon calls the rank again
            if soonest >= now + policy.patience * run.time[WEIGHT][stage]:
                run.left[rank].popleft()
                run.do(rank, WEIGHT, stage, microbatch, now)
    return run.answer if min(run.begun[True]) == problem.num_microbatches else None


class _Run:
    """The state of all ranks within a step."""

    def __init__(self, problem: Problem, policy: Policy) -> None:
        self.p = p = problem
        self.policy = policy
        k, m, ranks = p.num_stages, p.num_microbatches, range(len(p.stages))
        self.ahead = policy.ahead or [m] * k
        # [kind][stage]: seconds, and the most that a rank may keep for one to begin
        self.time, self.room = p.by_kind(p.time), self._room()
        # [is a backward][stage]: its recompute, and how long what it needs is on its way
        self.redo, self.lag = p.by_kind(p.redo), p.by_kind(p.lag)
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
        """Return the most bytes that a rank may keep for each kind to begin, by stage."""
        p, limits = self.p, self.p.limits or [inf] * len(self.p.stages)
        room = [
            [limits[rank] - peak for rank, peak in zip(p.ranks, peaks, strict=True)]
            for peaks in p.by_kind(p.peak)
        ]
        for stage in self.policy.whole:
            room[INPUT][stage] = room[WHOLE][stage]
        # without an order: leave room for one micro-batch through this stage and the later ones
        if self.policy.orders is None:
            for rank, stages in enumerate(p.stages):
                for place, s in enumerate(stages):
                    room[FORWARD][s] = limits[rank] - least_bytes(p, stages[place:])
        return room

    def next_step(self, rank: int, now: float) -> tuple[Step | None, float]:
        """Return the step that begins now, if any, and the first known time of a later one."""
        best, least, soonest = None, None, inf
        # keys are computed only if two steps are ready: most often one is
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
        """List the steps that order and memory let come next, ready or not."""
        live, (may_begin, may_give, _, may_be_whole) = self.live[rank], self.room
        forwards, backwards = self.begun
        if self.policy.orders is not None:
            done = sum(forwards[s] + backwards[s] for s in self.p.stages[rank])
            order = self.policy.orders[rank]
            if done == len(order) or not (order[done][0] or live <= may_begin[order[done][1]]):
                return []
            return [order[done]]
        steps: list[Step] = []
        m, ahead = self.p.num_microbatches, self.ahead
        for stage in self.p.stages[rank]:
            forward, backward = forwards[stage], backwards[stage]
            if forward < m and live <= may_begin[stage] and forward - backward < ahead[stage]:
                steps.append((False, stage, forward))
            if backward < forward and (
                live <= may_give[stage]
                # a whole backward must not overtake an earlier weights' part of its stage
                or (live <= may_be_whole[stage] and stage not in dict(self.left[rank]))
            ):
                steps.append((True, stage, backward))
        return steps

    def begin(self, rank: int, is_backward: bool, stage: int, microbatch: int, now: float) -> None:
        """Run a step, in one part or its first, and call the rank that waits for its result."""
        p, redo, ready = self.p, self.redo[is_backward], self.ready[is_backward]
        kind = FORWARD
        if is_backward:
            divides = stage not in self.policy.whole and self.live[rank] <= self.room[INPUT][stage]
            kind = INPUT if divides else WHOLE
            if divides:
                self.left[rank].append((stage, microbatch))
        # recompute while the gradient is on its way, unless the forward stands right before
        if redo[stage]:
            arrival = ready[stage][microbatch] + redo[stage]
            if self.answer[rank][-1] != p.op(FORWARD, stage, microbatch):
                now += redo[stage]
            now = max(now, arrival)
        self.begun[is_backward][stage] += 1
        end = self.do(rank, kind, stage, microbatch, now)
        # hand the result on: forwards to the next stage, gradients to the one before
        target = stage - 1 if is_backward else stage + 1
        if target == p.num_stages:  # the loss: its gradient is there at once
            self.ready[True][stage][microbatch] = end - self.redo[True][stage]
        elif target >= 0:
            at = end + self.lag[is_backward][target] - redo[target]
            ready[target][microbatch] = at
            other, look = p.ranks[target], max(at, end)
            if look >= self.free[other]:
                heappush(self.calls, (look, other))

    def do(self, rank: int, kind: int, stage: int, microbatch: int, now: float) -> float:
        op = self.p.op(kind, stage, microbatch)
        end = now + self.time[kind][stage]
        self.answer[rank].append(op)
        self.live[rank] += self.p.change[kind * self.p.num_stages + stage]
        self.free[rank] = end
        heappush(self.calls, (end, rank))
        return end
