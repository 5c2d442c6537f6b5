"""What a scheduler is given, as arrays of numbers, and the price of an answer.

An operation is a number: kind * K * M + stage * M + micro-batch, for K stages and M micro-batches;
the kinds are those of KINDS.  An answer is a list of operations for each rank.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise
from math import inf, lcm
from operator import mul

from penstock.errors import ConfigError

from . import ir
from .costs import Costs, Seconds, per_edge, per_stage
from .ir import Schedule
from .laws import AtMostBytes

FORWARD, INPUT, WEIGHT, WHOLE = range(4)
KINDS: tuple[Callable[[int, int], ir.Compute], ...] = (
    ir.Forward,
    ir.BackwardInput,
    ir.BackwardWeight,
    ir.Backward,
)
Answer = list[list[int]]
_Flags = Sequence[bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Numbers by operation: its time, what it waits for and how long that travels, its bytes.

    `redo[x]` is a recompute that stands before x: it does not wait for x's operand, and is left
    out where the Forward stands right before.  `result[x]` is where others find x's end: a
    Backward's at its BackwardInput.  A rank that keeps `live` bytes keeps live + `peak[x]` at most
    while x runs, and live + `change[x]` after it.
    """

    num_stages: int
    num_microbatches: int
    ranks: tuple[int, ...]
    stages: tuple[tuple[int, ...], ...]
    time: Sequence[float]
    redo: Sequence[float]
    operand: Sequence[int]
    lag: Sequence[float]
    result: Sequence[int]
    peak: Sequence[int]
    change: Sequence[int]
    limits: tuple[int, ...] | None

    @property
    def size(self) -> int:
        """How many forwards there are."""
        return self.num_stages * self.num_microbatches

    def op(self, kind: int, stage: int, microbatch: int) -> int:
        """Return the number of an operation."""
        return (kind * self.num_stages + stage) * self.num_microbatches + microbatch

    def parts(self, op: int) -> tuple[int, int, int]:
        """Return the kind, stage and micro-batch of an operation."""
        of_all, microbatch = divmod(op, self.num_microbatches)
        return (*divmod(of_all, self.num_stages), microbatch)

    def times(self) -> list[list[float]]:
        """Return what each kind of operation takes on each stage."""
        stages = range(self.num_stages)
        return [[self.time[self.op(kind, s, 0)] for s in stages] for kind in range(4)]


def problem_of(
    costs: Costs,
    memory: AtMostBytes | None,
    ranks: tuple[int, ...],
    num_microbatches: int,
    recompute: Iterable[int],
) -> Problem:
    """Return the problem of running stages on `ranks` under these costs and this limit.

    Raises:
        ConfigError: costs, sizes or limits are of another number of stages or ranks.
    """
    num_stages, num_ranks, m = len(ranks), 1 + max(ranks), num_microbatches
    forward, of_inputs, of_weights, whole, again, travel = _times(costs, ranks)
    redone = tuple(again[s] if s in set(recompute) else 0 for s in range(num_stages))
    nothing = (0,) * num_stages
    size, first, last = num_stages * m, range(m), range((num_stages - 1) * m, num_stages * m)
    before = [-1 if x in first else x - m for x in range(size)]
    behind = [-1 if x in last else size + x + m for x in range(size)]
    free = [-1] * size
    changes, peaks = _bytes(memory, num_stages, set(recompute))

    def spread(*by_stage: Sequence[float]) -> list[float]:
        return [value for values in by_stage for value in values for _ in range(m)]

    return Problem(
        num_stages=num_stages,
        num_microbatches=m,
        ranks=ranks,
        stages=tuple(
            tuple(s for s in range(num_stages) if ranks[s] == r) for r in range(num_ranks)
        ),
        time=spread(forward, of_inputs, of_weights, whole),
        redo=spread(nothing, redone, nothing, redone),
        operand=[*before, *behind, *free, *behind],
        lag=spread((0, *travel), (*travel, 0), nothing, (*travel, 0)),
        result=[*range(3 * size), *range(size, 2 * size)],
        change=[x for values in changes for x in values for _ in range(m)],
        peak=[x for values in peaks for x in values for _ in range(m)],
        limits=memory.limits(num_ranks) if memory else None,
    )


def length(problem: Problem, answer: Answer) -> tuple[float, float]:
    """Return when the last rank ends, as the simulator says, and for equal ones the sum of all
    ranks' ends; infinite if ranks wait for each other for ever.  Floats are added in another order
    than there where messages take a rank's time.
    """
    ran = run(problem, answer)
    return (max(ran[0]), sum(ran[0])) if ran else (inf, inf)


def run(problem: Problem, answer: Answer) -> tuple[list[float], list[float]] | None:
    """Return when each rank ends, and each operation by its `result`; None if ranks wait for each
    other for ever.
    """
    p = problem
    time, redo, operand, lag, result = p.time, p.redo, p.operand, p.lag, p.result
    size = p.size
    ends: list[float] = [-1] * (3 * size)
    waiting, position = [-1] * (3 * size), [0] * len(answer)
    free: list[float] = [0] * len(answer)
    runnable, left = list(range(len(answer))), len(answer)
    while runnable:
        rank = runnable.pop()
        program, now = answer[rank], free[rank]
        for index in range(position[rank], len(program)):
            op = program[index]
            need = operand[op]
            if need >= 0 and ends[need] < 0:
                waiting[need], position[rank], free[rank] = rank, index, now
                break
            if redo[op] and program[index - 1] != op % size:
                now += redo[op]
            if need >= 0 and ends[need] + lag[op] > now:
                now = ends[need] + lag[op]
            now += time[op]
            done = result[op]
            ends[done] = now
            if waiting[done] >= 0:
                runnable.append(waiting[done])
        else:
            free[rank], left = now, left - 1
    return None if left else (free, ends)


def fits(problem: Problem, rank: int, program: Iterable[int]) -> bool:
    """Tell whether a rank's program keeps to its limit of bytes."""
    if problem.limits is None:
        return True
    live, limit, peak, change = 0, problem.limits[rank], problem.peak, problem.change
    for op in program:
        if live + peak[op] > limit:
            return False
        live += change[op]
    return True


def answer_of(problem: Problem, schedule: Schedule) -> Answer:
    """Write a schedule of compute instructions as numbers."""
    kind = {made: number for number, made in enumerate(KINDS)}
    return [
        [
            problem.op(kind[type(x)], x.stage, x.microbatch)
            for x in program
            if isinstance(x, ir.Compute)
        ]
        for program in schedule.programs
    ]


def schedule_of(problem: Problem, answer: Answer) -> Schedule:
    """Read a schedule from its numbers."""

    def instruction(op: int) -> ir.Instruction:
        kind, stage, microbatch = problem.parts(op)
        return KINDS[kind](stage, microbatch)

    return Schedule(tuple(tuple(map(instruction, program)) for program in answer))


def joined(problem: Problem, answer: Answer) -> Answer:
    """Make one backward of two parts that stand together, where nothing then ends later: it takes
    no longer, and the stage before uses the gradient only once both are done.
    """
    p, size, m = problem, problem.size, problem.num_microbatches
    ran = run(problem, answer)
    assert ran is not None
    _, ends = ran
    wholes = {p.result[op] for program in answer for op in program if op >= WHOLE * size}

    def are_one(op: int, after: int) -> bool:
        whole, user = op + (WHOLE - INPUT) * size, op - m
        if op // size != INPUT or after != op + size:
            return False
        if p.time[whole] > p.time[op] + p.time[after]:
            return False
        took = p.time[user + (WHOLE - INPUT) * size if user in wholes else user]
        return user < size or ends[after] + p.lag[user] + took <= ends[user]

    result: Answer = []
    for program in answer:
        result.append(made := [])
        for op, after in zip(program, [*program[1:], -1], strict=True):
            if are_one(op, after):
                made.append(op + (WHOLE - INPUT) * size)
            elif not made or made[-1] != op + (WHOLE - WEIGHT) * size:
                made.append(op)
    return result


def least_bytes(problem: Problem, stages: Sequence[int]) -> int:
    """Return what a rank needs to take one micro-batch through some of its stages and back."""
    live = most = 0
    for op in (
        *(problem.op(FORWARD, stage, 0) for stage in stages),
        *(problem.op(WHOLE, stage, 0) for stage in reversed(stages)),
    ):
        most = max(most, live + problem.peak[op])
        live += problem.change[op]
    return most


def check_limits(problem: Problem) -> None:
    """Refuse limits that no schedule keeps to.

    Raises:
        ConfigError: a rank cannot keep even one micro-batch.
    """
    for rank, limit in enumerate(problem.limits or ()):
        least = least_bytes(problem, problem.stages[rank])
        if least > limit:
            raise ConfigError(
                f"no schedule keeps to the limit of rank {rank}: it needs {least:,} bytes for one "
                f"micro-batch after the other, {least - limit:,} more than limit_bytes={limit:,}; "
                f"raise that to {least:,} at least, or keep less of a micro-batch (recompute, "
                "more micro-batches)"
            )


def lower_bound(problem: Problem) -> float:
    """Return a time that no answer can beat: the busiest rank's, or a micro-batch's way."""
    p, m = problem, problem.num_microbatches
    forward, of_inputs, of_weights, whole = p.times()
    lag = [p.lag[p.op(FORWARD, s, 0)] for s in range(p.num_stages)]
    give = list(map(min, of_inputs, whole))
    add = [min(i + w, b) for i, w, b in zip(of_inputs, of_weights, whole, strict=True)]
    heads = [0, *accumulate(f + g for f, g in zip(forward, lag[1:], strict=False))]
    tails = [0, *accumulate(i + g for i, g in zip(give, lag[1:], strict=False))]
    turn = forward[-1] + give[-1]
    bounds = [heads[-1] + turn + tails[-1] - give[0] + add[0]]
    for stages in p.stages:
        work = m * sum(forward[s] + add[s] for s in stages)
        gives = m * sum(forward[s] + give[s] for s in stages)
        bounds += [heads[stages[0]] + work, heads[stages[0]] + gives + tails[stages[0]]]
    return max(bounds)


def _times(costs: Costs, ranks: tuple[int, ...]) -> Sequence[Sequence[float]]:
    """Return what a forward, the parts of a backward, a whole one and a recompute take on each
    stage, and how long a message travels from each stage but the last to the next.

    A rank takes a message in right before what it is for, and sends one off right after: both are
    in the times of these.
    """
    num_stages, wire_s = len(ranks), per_edge(costs.transfer_s)
    apart = [here != there for here, there in pairwise(ranks)]
    forward, of_inputs, of_weights, whole, again, travel, send, receive = _alike(
        (
            per_stage(costs.forward_s, num_stages, "forward_s"),
            *costs.parts(num_stages),
            per_stage(costs.backward_s, num_stages, "backward_s"),
            costs.again(num_stages),
            tuple(wire_s(s, s + 1) if apart[s] else 0 for s in range(num_stages - 1)),
            per_stage(costs.send_s, num_stages, "send_s"),
            per_stage(costs.receive_s, num_stages, "receive_s"),
        )
    )
    above, below = (False, *apart), (*apart, False)  # is the stage before, after, elsewhere?

    def with_messages(alone: Sequence[float], comes: _Flags, goes: _Flags) -> tuple[float, ...]:
        taken = zip(alone, map(mul, receive, comes), map(mul, send, goes), strict=True)
        return tuple(map(sum, taken))

    return (
        with_messages(forward, above, below),
        with_messages(of_inputs, below, above),
        of_weights,
        with_messages(whole, below, above),
        again,
        travel,
    )


def _alike(times: Sequence[Sequence[Seconds]]) -> list[tuple[float, ...]]:
    """Make ints of ints and Fractions, all times the same factor; leave floats as they are."""
    numbers = [x for values in times for x in values]
    if any(isinstance(x, float) for x in numbers):
        return [tuple(float(x) for x in values) for values in times]
    scale = lcm(*(Fraction(x).denominator for x in numbers))
    return [tuple(int(x * scale) for x in values) for values in times]


def _bytes(
    memory: AtMostBytes | None, num_stages: int, recompute: set[int]
) -> tuple[list[list[int]], list[list[int]]]:
    """Return what each kind of operation changes on each stage, and keeps at most meanwhile."""
    changes: list[list[int]] = [[], [], [], []]
    peaks: list[list[int]] = [[], [], [], []]
    if memory is None:
        return [[0] * num_stages] * 4, [[0] * num_stages] * 4
    for stage, kept in enumerate(memory.sizes.of_stages(num_stages)):
        first = kept.inputs if stage in recompute else kept.graph
        rebuilt = kept.graph - first
        after = (first, kept.weights - first, -kept.weights, -first)
        during = (first, max(rebuilt, kept.weights - first), 0, rebuilt)
        for kind in range(4):
            changes[kind].append(after[kind])
            peaks[kind].append(during[kind])
    return changes, peaks
