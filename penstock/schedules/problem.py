"""The search problem of the list schedulers, as arrays of numbers, and the price of an answer.

An operation is a number: kind * K * M + stage * M + micro-batch, for K stages and M micro-batches.
KINDS lists the kinds.  An answer is a list of operations for each rank.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, chain, pairwise
from math import inf, lcm

from penstock.errors import ConfigError

from . import ir
from .costs import Costs, Number, Seconds, per_edge, per_stage
from .ir import Schedule
from .laws import AtMostBytes
from .memory import Sizes

FORWARD, INPUT, WEIGHT, WHOLE = range(4)
KINDS: tuple[Callable[[int, int], ir.Compute], ...] = (
    ir.Forward,
    ir.BackwardInput,
    ir.BackwardWeight,
    ir.Backward,
)
Answer = list[list[int]]
"""The operations of each rank, in the order in which it runs them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Operands of every operation, times and bytes of its kind on its stage, limits of ranks.

    Operation x has row x // num_microbatches: kind * num_stages + stage.
    """

    num_stages: int
    num_microbatches: int
    ranks: tuple[int, ...]
    """The rank of each stage."""
    stages: tuple[tuple[int, ...], ...]
    """The stages of each rank, in order."""
    operand: Sequence[int]
    """By operation: the one whose result it waits for; -1 for none."""
    result: Sequence[int]
    """By operation: the index of its end for others; a Backward has that of its BackwardInput."""
    time: Sequence[float]
    """By row: the duration of an operation, with its messages."""
    redo: Sequence[float]
    """By row: the duration of the Recompute before an operation; 0 if there is none.  It does not
    wait for the operand, and is left out right after its Forward."""
    lag: Sequence[float]
    """By row: the time for which the operand travels."""
    peak: Sequence[int]
    """By row: additional bytes that the rank keeps at most while an operation runs."""
    change: Sequence[int]
    """By row: additional bytes that the rank keeps after an operation."""
    limits: tuple[int, ...] | None
    """The bytes that each rank may keep."""

    @property
    def size(self) -> int:
        """The number of forwards."""
        return self.num_stages * self.num_microbatches

    def op(self, kind: int, stage: int, microbatch: int) -> int:
        return (kind * self.num_stages + stage) * self.num_microbatches + microbatch

    def by_kind(self, rows: Sequence[Number]) -> list[Sequence[Number]]:
        """Divide values by row into those of each kind, by stage."""
        k = self.num_stages
        return [rows[kind * k : (kind + 1) * k] for kind in range(4)]


def problem_of(
    costs: Costs,
    memory: AtMostBytes | None,
    ranks: tuple[int, ...],
    num_microbatches: int,
    recompute: Iterable[int],
) -> Problem:
    """Return the problem of running stages on `ranks` under these costs and this limit; a
    ConfigError if these are of another number of stages or ranks.
    """
    num_stages, num_ranks, m = len(ranks), 1 + max(ranks), num_microbatches
    recompute, nothing = set(recompute), (0,) * num_stages
    forward, of_inputs, of_weights, whole, again, travel = _times(costs, ranks)
    redone = tuple(again[s] if s in recompute else 0 for s in range(num_stages))

    # operands: a forward waits for the stage before, a backward for the stage behind
    size, first, last = num_stages * m, range(m), range((num_stages - 1) * m, num_stages * m)
    before = [-1 if x in first else x - m for x in range(size)]
    behind = [-1 if x in last else size + x + m for x in range(size)]
    free = [-1] * size

    # bytes of each kind on a stage, in the order of KINDS
    sizes = Sizes(kept_bytes=0) if memory is None else memory.sizes
    changes: list[tuple[int, ...]] = []
    peaks: list[tuple[int, ...]] = []
    for stage, kept in enumerate(sizes.of_stages(num_stages)):
        stored = kept.inputs if stage in recompute else kept.graph
        rebuilt, part = kept.graph - stored, kept.weights - stored
        changes.append((stored, part, -kept.weights, -stored))
        peaks.append((stored, max(rebuilt, part), 0, rebuilt))

    return Problem(
        num_stages=num_stages,
        num_microbatches=m,
        ranks=ranks,
        stages=tuple(
            tuple(s for s in range(num_stages) if ranks[s] == r) for r in range(num_ranks)
        ),
        time=[*forward, *of_inputs, *of_weights, *whole],
        redo=[*nothing, *redone, *nothing, *redone],
        operand=[*before, *behind, *free, *behind],
        lag=[0, *travel, *travel, 0, *nothing, *travel, 0],
        result=[*range(3 * size), *range(size, 2 * size)],
        change=[*chain.from_iterable(zip(*changes, strict=True))],
        peak=[*chain.from_iterable(zip(*peaks, strict=True))],
        limits=memory.limits(num_ranks) if memory else None,
    )


def length(problem: Problem, answer: Answer) -> tuple[float, float]:
    """Return the end of the last rank, and the sum of all ranks' ends to order equal ones.

    Both are infinite if ranks deadlock.  The simulator finds the same end of the last rank, but
    for rounding: it adds floats in another order if messages take a rank's time.
    """
    ran = run(problem, answer)
    return (max(ran[0]), sum(ran[0])) if ran else (inf, inf)


def run(problem: Problem, answer: Answer) -> tuple[list[float], list[float]] | None:
    """Return the end of each rank, and of each operation by its `result`; None for a deadlock."""
    p, size, m = problem, problem.size, problem.num_microbatches
    time, redo, operand, lag, result = p.time, p.redo, p.operand, p.lag, p.result
    ends: list[float] = [-1] * (3 * size)
    waiting, position = [-1] * (3 * size), [0] * len(answer)
    free: list[float] = [0] * len(answer)
    runnable, left = list(range(len(answer))), len(answer)
    while runnable:
        # run one rank until its operand is missing; its producer makes it runnable again
        rank = runnable.pop()
        program, now = answer[rank], free[rank]
        for index in range(position[rank], len(program)):
            op = program[index]
            need, row = operand[op], op // m
            if need >= 0 and ends[need] < 0:
                waiting[need], position[rank], free[rank] = rank, index, now
                break
            # a recompute runs while the operand is still on its way
            if redo[row] and program[index - 1] != op % size:
                now += redo[row]
            if need >= 0 and ends[need] + lag[row] > now:
                now = ends[need] + lag[row]
            now += time[row]
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
        row = op // problem.num_microbatches
        if live + peak[row] > limit:
            return False
        live += change[row]
    return True


def answer_of(problem: Problem, schedule: Schedule) -> Answer:
    """Write a schedule of compute instructions as numbers."""
    kind = {kind_class: number for number, kind_class in enumerate(KINDS)}
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
    size, m = problem.size, problem.num_microbatches
    return Schedule.of(
        (KINDS[op // size](*divmod(op % size, m)) for op in program) for program in answer
    )


def joined(problem: Problem, answer: Answer) -> Answer:
    """Make one backward of two adjacent parts if nothing then ends later.

    The whole backward takes no longer than both parts.  The stage before uses the gradient only
    once both are done.
    """
    # 1. Run the answer once, to know when each operation ends.
    p, size, m = problem, problem.size, problem.num_microbatches
    ran = run(problem, answer)
    assert ran is not None
    _, ends = ran
    wholes = {p.result[op] for program in answer for op in program if op >= WHOLE * size}

    def are_one(op: int, after: int) -> bool:
        # `user`: the backward of the stage before, which waits for this gradient
        whole, user = op + (WHOLE - INPUT) * size, op - m
        if op // size != INPUT or after != op + size:
            return False
        if p.time[whole // m] > p.time[op // m] + p.time[after // m]:
            return False
        took = p.time[(user + (WHOLE - INPUT) * size if user in wholes else user) // m]
        return user < size or ends[after] + p.lag[user // m] + took <= ends[user]

    # 2. Put a whole backward in the place of two parts that may be one.
    result: Answer = []
    for program in answer:
        result.append(operations := [])
        for op, after in zip(program, [*program[1:], -1], strict=True):
            if are_one(op, after):
                operations.append(op + (WHOLE - INPUT) * size)
            elif not operations or operations[-1] != op + (WHOLE - WEIGHT) * size:
                operations.append(op)
    return result


def least_bytes(problem: Problem, stages: Sequence[int]) -> int:
    """Return the bytes a rank needs to run one micro-batch through some of its stages and back."""
    live = most = 0
    for row in (*stages, *(WHOLE * problem.num_stages + stage for stage in reversed(stages))):
        most = max(most, live + problem.peak[row])
        live += problem.change[row]
    return most


def check_is_limit(memory: object) -> None:
    """Raise a ConfigError for a `memory` argument that is neither a limit of bytes nor None."""
    if not isinstance(memory, AtMostBytes | None):
        raise ConfigError(
            f"memory={memory!r} is no limit of bytes: write AtMostBytes(Sizes(kept_bytes=...), "
            "limit_bytes=...), or None for no limit; with kept_bytes=1 it counts micro-batches"
        )


def check_limits(problem: Problem) -> None:
    """Raise a ConfigError for limits under which a rank cannot keep even one micro-batch."""
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
    """Return a time that no answer can beat: the busiest rank's, or that of one micro-batch."""
    p, m = problem, problem.num_microbatches
    forward, of_inputs, of_weights, whole = p.by_kind(p.time)
    lag = p.by_kind(p.lag)[FORWARD]
    # least seconds until a stage's backward hands on its gradient, and until all of it is done
    give = list(map(min, of_inputs, whole))
    add = [min(i + w, b) for i, w, b in zip(of_inputs, of_weights, whole, strict=True)]
    # least seconds before a stage's first forward, and after its last gradient
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
    """Return the times of each stage: forward, both parts of a backward, whole one, recompute.

    Last comes the time for which a message travels from each stage but the last to the next.  A
    rank receives right before the instruction that needs the message, and sends right after the
    one that makes it.  The times of forwards and backwards include both.
    """
    # 1. Bring all costs to one scale; neighbours on one rank send nothing to each other.
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
    # 2. Add sends and receives to the operations that need them.
    above, below = (False, *apart), (*apart, False)  # is the stage before, after, elsewhere?

    def with_messages(
        alone: Sequence[float], comes: Sequence[bool], goes: Sequence[bool]
    ) -> list[float]:
        rows = zip(alone, receive, comes, send, goes, strict=True)
        return [s + in_s * arrives + out_s * leaves for s, in_s, arrives, out_s, leaves in rows]

    return (
        with_messages(forward, above, below),
        with_messages(of_inputs, below, above),
        of_weights,
        with_messages(whole, below, above),
        again,
        travel,
    )


def _alike(times: Sequence[Sequence[Seconds]]) -> list[tuple[float, ...]]:
    """Scale ints and Fractions to ints by one common factor; return floats if any is one."""
    numbers = [x for values in times for x in values]
    if any(isinstance(x, float) for x in numbers):
        return [tuple(float(x) for x in values) for values in times]
    scale = lcm(*(Fraction(x).denominator for x in numbers))
    return [tuple(int(x * scale) for x in values) for values in times]
