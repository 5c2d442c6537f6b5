"""The best answer to a small problem: every order that matters, cut short by bounds.

A rank may always do at once what ends before anything else can begin there (Giffler and Thompson
1960), so orders branch only between operations that compete with it for its rank.  Of two ways to
have done the same operations, one that is nowhere later makes the other one needless.
"""

from collections.abc import Iterator
from operator import le

from penstock.schedules.problem import FORWARD, INPUT, WEIGHT, WHOLE, Answer, Problem, length

MOST_OPERATIONS = 60
MOST_NODES = 50_000
_MOST_KEPT = 40
"""So many ways of having done the same are compared with a new one."""


def proved(problem: Problem, answer: Answer, goal: float) -> tuple[Answer, bool]:
    """Return an answer no longer than `answer`, and whether it is known to be the best.

    Nothing is shorter than `goal`.
    """
    step, _ = length(problem, answer)
    if step <= goal:
        return answer, True
    if 3 * problem.size > MOST_OPERATIONS:
        return answer, False
    search = _Search(problem, step, goal)
    search.visit()
    return search.best or answer, search.nodes <= MOST_NODES


class _Search:
    """A depth-first search: what is done so far, and the best answer yet."""

    def __init__(self, problem: Problem, length: float, goal: float) -> None:
        self.p, self.length, self.goal, self.nodes = problem, length, goal, 0
        self.best: Answer | None = None
        k, ranks = problem.num_stages, len(problem.stages)
        self.done = [[0] * k for _ in range(3)]
        self.free: list[float] = [0] * ranks
        self.held = [-1] * ranks
        self.live = [0] * ranks
        self.ends: list[float] = [-1] * (3 * problem.size)
        self.answer: Answer = [[] for _ in range(ranks)]
        self.seen: dict[tuple[int, ...], list[tuple[float, ...]]] = {}
        self.time = problem.times()
        self.lag = [problem.lag[problem.op(FORWARD, s, 0)] for s in range(k)] + [0]
        self.again = [problem.redo[problem.op(INPUT, s, 0)] for s in range(k)]
        self.give = list(map(min, self.time[INPUT], self.time[WHOLE]))
        parts = zip(self.time[INPUT], self.time[WEIGHT], self.time[WHOLE], strict=True)
        self.add = [min(i + w, b) for i, w, b in parts]
        self.may_wait = [self.rank_may_wait(stages) for stages in problem.stages]

    def rank_may_wait(self, stages: tuple[int, ...]) -> bool:
        """Tell whether doing at once what can be done may be wrong: for its bytes, or because a
        recompute is then needed.
        """
        p = self.p
        grows = any(p.change[p.op(INPUT, s, 0)] > 0 for s in stages)
        return any(
            self.again[s] or self.time[WHOLE][s] < self.time[WEIGHT][s] for s in stages
        ) or (p.limits is not None and (len(stages) > 1 or grows))

    def visit(self, waited: bool = False) -> None:
        """Try all that may come next; one who has `waited` does so in spite of being later."""
        self.nodes += 1
        if self.nodes > MOST_NODES or self.length <= self.goal or self.bound() >= self.length:
            return
        choices = list(self.choices())
        if not choices:
            self.finish()
            return
        if not waited and self.beaten():
            return
        end, _, first = min(choices)
        rank = self.rank_of(first)
        slot = self.p.result[first]
        for begin, op in sorted((begin, op) for _, begin, op in choices):
            if self.rank_of(op) == rank and (begin < end or self.p.result[op] == slot):
                self.do(rank, op)
        if self.may_wait[rank] and self.held[rank] < 0:
            self.wait(rank, end)

    def rank_of(self, op: int) -> int:
        return self.p.ranks[self.p.parts(op)[1]]

    def finish(self) -> None:
        if sum(self.done[WEIGHT]) == self.p.size and max(self.free) < self.length:
            self.length, self.best = max(self.free), [program[:] for program in self.answer]

    def choices(self) -> Iterator[tuple[float, float, int]]:
        """Yield (end, start, operation) of all that has what it needs."""
        p = self.p
        for stage, rank in enumerate(p.ranks):
            free, held = self.free[rank], self.held[rank]
            room = float("inf") if p.limits is None else p.limits[rank] - self.live[rank]
            for op in self.next_of(stage):
                need = p.operand[op]
                if p.peak[op] > room or (need >= 0 and self.ends[need] < 0):
                    continue
                if held in {-1, op}:
                    begin = self.begin(rank, op)
                    yield begin + p.time[op], free if self.again_s(rank, op) else begin, op

    def again_s(self, rank: int, op: int) -> float:
        """Return how long the recompute takes that comes before `op`."""
        program = self.answer[rank]
        return 0 if program and program[-1] == op % self.p.size else self.p.redo[op]

    def begin(self, rank: int, op: int) -> float:
        """Return when `op` begins, after its recompute, if it comes next."""
        p, need = self.p, self.p.operand[op]
        arrives = 0 if need < 0 else self.ends[need] + p.lag[op]
        return max(self.free[rank] + self.again_s(rank, op), arrives)

    def next_of(self, stage: int) -> Iterator[int]:
        """Yield what the stage may do next, whether or not it has what others give."""
        p, (forwards, gives, adds) = self.p, (done[stage] for done in self.done)
        if forwards < p.num_microbatches:
            yield p.op(FORWARD, stage, forwards)
        if gives < forwards:
            yield p.op(INPUT, stage, gives)
            if adds == gives:
                yield p.op(WHOLE, stage, gives)
        if adds < gives:
            yield p.op(WEIGHT, stage, adds)

    def do(self, rank: int, op: int) -> None:
        """Do an operation, try all that may follow, and take it back."""
        p = self.p
        program, free, held = self.answer[rank], self.free[rank], self.held[rank]
        slot, end = p.result[op], self.begin(rank, op) + p.time[op]
        kind, stage, _ = p.parts(op)
        kinds = (INPUT, WEIGHT) if kind == WHOLE else (kind,)
        for each in kinds:
            self.done[each][stage] += 1
        self.free[rank] = self.ends[slot] = end
        self.held[rank] = -1
        self.live[rank] += p.change[op]
        program.append(op)
        self.visit()
        program.pop()
        self.live[rank] -= p.change[op]
        self.free[rank], self.ends[slot], self.held[rank] = free, -1, held
        for each in kinds:
            self.done[each][stage] -= 1

    def wait(self, rank: int, until: float) -> None:
        """Let a rank do nothing for a while, or nothing but one gradient once it is there, whose
        recompute may begin before.
        """
        p, free = self.p, self.free[rank]
        if until > free:
            self.free[rank] = until
            self.visit(waited=True)
            self.free[rank] = free
        for stage in p.stages[rank]:
            for op in self.next_of(stage):
                if p.redo[op]:
                    self.held[rank] = op
                    self.visit()
                    self.held[rank] = -1

    def beaten(self) -> bool:
        """Tell whether the same was done before, nowhere later; else remember how it is done."""
        p = self.p
        key = (*(x for done in self.done for x in done), *self.held)
        if any(self.again):
            key += tuple(program[-1] if program else -1 for program in self.answer)
        label = list(self.free)
        for stage in range(p.num_stages - 1):
            up, down = self.free[p.ranks[stage + 1]], self.free[p.ranks[stage]]
            lag = self.lag[stage + 1]
            for i in range(self.done[FORWARD][stage + 1], self.done[FORWARD][stage]):
                label.append(max(up, self.ends[p.op(FORWARD, stage, i)] + lag))
            for i in range(self.done[INPUT][stage], self.done[INPUT][stage + 1]):
                label.append(max(down, self.ends[p.op(INPUT, stage + 1, i)] + lag))
        others = self.seen.setdefault(key, [])
        if any(all(map(le, other, label)) for other in others):
            return True
        if len(others) < _MOST_KEPT:
            others.append(tuple(label))
        return False

    def bound(self) -> float:
        """Return when the step ends at the earliest."""
        p, m, (forwards, gives, adds) = self.p, self.p.num_microbatches, self.done
        forward, give = self.time[FORWARD], self.give
        at = [self.free[rank] for rank in p.ranks]
        ended: float = 0
        most: float = 0
        for s in range(p.num_stages):  # when the stage's last forward ends
            left = m - forwards[s]
            ended = max(at[s] + left * forward[s], ended + self.lag[s] + forward[s]) if left else 0
        for s in reversed(range(p.num_stages)):  # when its last gradient of inputs does
            left = m - gives[s]
            if left:
                own = at[s] + (m - forwards[s]) * forward[s] + left * give[s]
                ended = max(own, ended + self.lag[s + 1] + give[s])
            else:
                ended = 0
            most = max(most, ended + (self.add[s] - give[s] if left else 0))
        for rank, stages in enumerate(p.stages):
            work = sum(
                (m - forwards[s]) * forward[s]
                + (m - gives[s]) * self.add[s]
                + (gives[s] - adds[s]) * self.time[WEIGHT][s]
                for s in stages
            )
            most = max(most, self.free[rank] + work)
        return most
