"""A first answer: each rank does, when it is free, what a rule prefers of all that is ready."""

from dataclasses import dataclass
from enum import Enum
from heapq import heapify, heappop, heappush

from .problem import FORWARD, INPUT, WEIGHT, WHOLE, Answer, Problem


class First(Enum):
    """Which of two that are ready goes first on a rank."""

    GRADIENT = "gradient"
    FORWARD = "forward"
    OTHER = "other"
    """The one that the rank did not do last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What a rank prefers.

    `ahead[stage]` is by how many micro-batches forwards may lead gradients of inputs.  A gradient
    of weights is computed when nothing else is ready, and if `fill[rank]` of its time passes
    before something is known to be; `soon`: before any further forward.  Stages in `whole` do not
    divide backwards.  Of a rank's stages, the `oldest` micro-batch goes first, or else the deepest
    stage.
    """

    ahead: tuple[int, ...]
    fill: tuple[float, ...]
    first: First = First.GRADIENT
    soon: bool = False
    whole: frozenset[int] = frozenset()
    oldest: bool = False


def built(problem: Problem, rule: Rule) -> Answer | None:
    """Return what ranks do that follow `rule`; None if they come to wait for ever."""
    answer = _Builder(problem, rule).run()
    whole = sum(op >= WHOLE * problem.size for program in answer for op in program)
    return answer if sum(map(len, answer)) + whole == 3 * problem.size else None


class _Builder:
    """Runs the clock: what is done, who is free when, and what each rank keeps."""

    def __init__(self, problem: Problem, rule: Rule) -> None:
        self.p, self.rule = problem, rule
        k, self.m = problem.num_stages, problem.num_microbatches
        self.size = k * self.m
        self.done = [[0] * k for _ in range(3)]
        self.ready: list[float] = [-1] * (3 * self.size)
        self.free: list[float] = [0] * len(problem.stages)
        self.live = [0] * len(problem.stages)
        self.answer: Answer = [[] for _ in problem.stages]

    def run(self) -> Answer:
        """Do everything; return what each rank did, in order."""
        events = [(0.0, rank) for rank in range(len(self.p.stages))]
        heapify(events)
        while events:
            now, rank = heappop(events)
            if self.free[rank] > now:
                continue
            op = self.choose(rank, now)
            if op < 0:
                continue
            end = self.do(rank, op, now)
            heappush(events, (end, rank))
            self.tell(events, op, end)
        return self.answer

    def tell(self, events: list[tuple[float, int]], op: int, end: float) -> None:
        """Wake up the rank that waits for what `op` gives, when that arrives."""
        p = self.p
        kind, stage, microbatch = p.parts(op)
        if kind == FORWARD and stage + 1 < p.num_stages:
            arrives = end + p.lag[p.op(FORWARD, stage + 1, microbatch)]
            heappush(events, (arrives, p.ranks[stage + 1]))
        elif kind in (INPUT, WHOLE) and stage:
            follower = p.op(INPUT, stage - 1, microbatch)
            # it may be recomputed while the gradient travels
            arrives = max(end, end + p.lag[follower] - p.redo[follower])
            heappush(events, (arrives, p.ranks[stage - 1]))

    def do(self, rank: int, op: int, now: float) -> float:
        """Run `op` from `now` on; return when it ends."""
        p = self.p
        program, need = self.answer[rank], p.operand[op]
        if p.redo[op] and not (program and program[-1] == op % self.size):
            now += p.redo[op]
        if need >= 0:
            now = max(now, self.ready[need] + p.lag[op])
        end = now + p.time[op]
        self.free[rank] = end
        self.ready[p.result[op]] = end
        self.live[rank] += p.change[op]
        program.append(op)
        kind, stage, _ = p.parts(op)
        for number in (INPUT, WEIGHT) if kind == WHOLE else (kind,):
            self.done[number][stage] += 1
        return end

    def choose(self, rank: int, now: float) -> int:
        """Return what a free rank does now; -1 if nothing."""
        rule = self.rule
        forward, gradient, soonest, blocked = self.candidates(rank, now)
        weight = self.weight(rank)
        if forward >= 0 and gradient >= 0:
            after_forward = self.answer[rank][-1] < self.size
            prefers = rule.first is First.OTHER and not after_forward
            return forward if prefers or rule.first is First.FORWARD else gradient
        if gradient >= 0:
            return gradient
        if forward >= 0 and not (rule.soon and weight >= 0):
            return forward
        fills = rule.soon or blocked
        if weight >= 0 and (fills or soonest - now >= rule.fill[rank] * self.p.time[weight]):
            return weight
        return forward

    def candidates(self, rank: int, now: float) -> tuple[int, int, float, bool]:
        """Return the forward and the gradient to do now, if any, when the next one will be known
        to be ready, and whether only bytes forbid a forward.
        """
        p = self.p
        forwards: list[int] = []
        gradients: list[int] = []
        soonest, blocked = float("inf"), False
        for stage in p.stages[rank]:
            forward, gradient = self.forward(stage), self.gradient(stage)
            for op, found in ((forward, forwards), (gradient, gradients)):
                if op < 0:
                    continue
                arrives = self.arrives(op) - p.redo[op]
                if arrives > now:
                    soonest = min(soonest, arrives)
                elif op != forward or self.safe(rank, stage):
                    found.append(op)
                else:
                    blocked = True
        forward, gradient = self.preferred(forwards, FORWARD), self.preferred(gradients, INPUT)
        return forward, gradient, soonest, blocked

    def preferred(self, ops: list[int], kind: int) -> int:
        if len(ops) < 2:
            return ops[0] if ops else -1
        sign = -1 if kind == FORWARD else 1

        def rank_of(op: int) -> tuple[int, int]:
            _, stage, microbatch = self.p.parts(op)
            return (microbatch if self.rule.oldest else 0, sign * stage)

        return min(ops, key=rank_of)

    def forward(self, stage: int) -> int:
        number = self.done[FORWARD][stage]
        if number == self.m or number - self.done[INPUT][stage] >= self.rule.ahead[stage]:
            return -1
        if stage and self.done[FORWARD][stage - 1] <= number:
            return -1
        return stage * self.m + number

    def gradient(self, stage: int) -> int:
        p, number = self.p, self.done[INPUT][stage]
        if number == self.done[FORWARD][stage]:
            return -1
        if stage + 1 < p.num_stages and self.done[INPUT][stage + 1] <= number:
            return -1
        rank = p.ranks[stage]
        whole = p.op(WHOLE, stage, number)
        if stage in self.rule.whole:
            return whole
        op = p.op(INPUT, stage, number)
        if p.limits is None or self.live[rank] + p.peak[op] <= p.limits[rank]:
            return op
        return whole if self.done[WEIGHT][stage] == number else -1

    def weight(self, rank: int) -> int:
        waiting = [
            self.p.op(WEIGHT, stage, self.done[WEIGHT][stage])
            for stage in self.p.stages[rank]
            if self.done[WEIGHT][stage] < self.done[INPUT][stage]
        ]
        return self.preferred(waiting, WEIGHT)

    def arrives(self, op: int) -> float:
        need = self.p.operand[op]
        return 0 if need < 0 else self.ready[need] + self.p.lag[op]

    def safe(self, rank: int, stage: int) -> bool:
        """Tell whether all that is begun can still end, one micro-batch after the other, after
        one more forward of `stage`.
        """
        p = self.p
        if p.limits is None:
            return True
        limit, stages = p.limits[rank], p.stages[rank]
        live = self.live[rank] + p.change[p.op(FORWARD, stage, 0)]
        if live > limit:
            return False
        forwards = {s: self.done[FORWARD][s] + (s == stage) for s in stages}
        gives = {s: self.done[INPUT][s] for s in stages}
        for s in stages:
            live += (gives[s] - self.done[WEIGHT][s]) * p.change[p.op(WEIGHT, s, 0)]
        for i in range(min(gives.values()), max(forwards.values())):
            left = [p.op(FORWARD, s, 0) for s in stages if forwards[s] <= i]
            left += [p.op(WHOLE, s, 0) for s in reversed(stages) if gives[s] <= i]
            for op in left:
                if live + p.peak[op] > limit:
                    return False
                live += p.change[op]
        return True
