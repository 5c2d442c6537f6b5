"""Passes: each rewrites a schedule, and does one thing.

    schedule(p, m) -> add_recompute -> add_offload -> add_commits -> add_communication
                   -> verify -> executor

and between processes add_reductions and post_receives before the proof.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import pairwise

from . import ir
from .ir import Instruction, Program, Schedule, is_backward_half
from .transfers import Transfers, neighbours


def add_recompute(
    schedule: Schedule, stages: Collection[int] | None = None, by_layers: Collection[int] = ()
) -> Schedule:
    """Drop the graphs of `stages` (None: of all) after their forwards and build them again before
    their backwards.

    0F0 0F1 0B0 0B1   ->   0f0 0f1 0R0 0B0 0R1 0B1

    A backward that follows its forward at once keeps the graph instead: dropping it saves nothing.
    It does save memory on the stages `by_layers`, which hold the graph of a layer at a time.
    """

    def rewrite(program: Program) -> Iterator[Instruction]:
        # 1. Find the backwards that follow their forward at once.
        at_once = {
            (before.stage, before.microbatch)
            for before, after in pairwise(program)
            if isinstance(before, ir.Forward)
            and isinstance(after, ir.GIVES_GRADIENTS)
            and (after.stage, after.microbatch) == (before.stage, before.microbatch)
        }

        def drops(stage: int, microbatch: int) -> bool:
            chosen = stages is None or stage in stages
            return chosen and (stage in by_layers or (stage, microbatch) not in at_once)

        # 2. Drop the other graphs, and recompute right before the backward.
        for instruction in program:
            match instruction:
                case ir.Forward(s, i, _, version) if drops(s, i):
                    yield ir.Forward(s, i, False, version)
                case ir.Backward(s, i) | ir.BackwardInput(s, i) if drops(s, i):
                    yield ir.Recompute(s, i)
                    yield instruction
                case _:
                    yield instruction

    return _rewrite(schedule, rewrite)


def add_offload(schedule: Schedule, stages: Collection[int]) -> Schedule:
    """Offload the activations of `stages` right after each forward, and fetch them one compute
    instruction before their use.

    0F0 0F1 0F2 0B0   ->   0F0 0H0 0F1 0D0 0F2 0B0

    Activations stay if there is no time for both in between.
    """

    def rewrite(program: Program) -> Iterator[Instruction]:
        # position of the first instruction that needs the activations of (stage, micro-batch)
        needed: dict[tuple[int, int], int] = {}
        for n, x in enumerate(program):
            if isinstance(x, ir.Recompute | ir.Backward | ir.BackwardInput) and x.stage in stages:
                needed.setdefault((x.stage, x.microbatch), n)
        # fetches by the position that they stand before: one instruction ahead of the use
        back: dict[int, Instruction] = {}
        for n, x in enumerate(program):
            if n in back:
                yield back[n]
            yield x
            if isinstance(x, ir.Forward):
                before = needed.get((x.stage, x.microbatch), 0) - 1
                if before > n + 1:
                    back[before] = ir.Fetch(x.stage, x.microbatch)
                    yield ir.Offload(x.stage, x.microbatch)

    return _rewrite(schedule, rewrite)


def add_commits(schedule: Schedule, stages: Collection[int], after: int | None = None) -> Schedule:
    """Commit BatchNorm statistics after the last forward, or after every `after` forwards."""
    if not stages:
        return schedule
    after = after or schedule.num_microbatches

    def rewrite(program: Program) -> Iterator[Instruction]:
        done: Counter[int] = Counter()
        for instruction in program:
            yield instruction
            if isinstance(instruction, ir.Forward) and instruction.stage in stages:
                done[instruction.stage] += 1
                if done[instruction.stage] % after == 0:
                    yield ir.CommitStatistics(instruction.stage)

    return _rewrite(schedule, rewrite)


def add_communication(schedule: Schedule, transfers: Transfers) -> Schedule:
    """Surround each forward and backward with the receives and sends of `transfers`.

    On stage 1 of 3:   1F0   ->   1F0<0 1F0 1F0>2
                       1B0   ->   1B0<2 1B0 1B0>0

    A receive stands right before its use, so that a Recompute before it runs while the gradient is
    still on its way.
    """
    # Activations go from producers to consumers, gradients the other way.
    producers, consumers = neighbours(transfers)
    forward = ir.ReceiveActivation, producers, ir.SendActivation, consumers
    backward = ir.ReceiveGradient, consumers, ir.SendGradient, producers

    def rewrite(program: Program) -> Iterator[Instruction]:
        for x in program:
            if not isinstance(x, ir.Forward | ir.Backward | ir.BackwardInput):
                yield x
                continue
            # Receive right before the use, send right after.
            receive, sources, send, targets = forward if isinstance(x, ir.Forward) else backward
            s, i = x.stage, x.microbatch
            for source in sources.get(s, ()):
                yield receive(s, i, source)
            yield x
            for target in targets.get(s, ()):
                yield send(s, i, target)

    return _rewrite(schedule, rewrite)


def add_reductions(schedule: Schedule) -> Schedule:
    """Add up the gradients of each stage over all replicas in its last backward: 0G 0B1."""

    def rewrite(program: Program) -> Iterator[Instruction]:
        last = {x.stage: n for n, x in enumerate(program) if isinstance(x, ir.ADDS_GRADIENTS)}
        for n, instruction in enumerate(program):
            if last.get(instruction.stage) == n:
                yield ir.ReduceGradients(instruction.stage)
            yield instruction

    return _rewrite(schedule, rewrite)


def post_receives(schedule: Schedule) -> Schedule:
    """Post each receive one compute instruction early, so that its transfer overlaps with that.

    1F0 1F1<0 1F1   ->   1F1?0 1F0 1F1<0 1F1
    """

    def rewrite(program: Program) -> Iterator[Instruction]:
        # posts[n] stands before groups[n]: the start of the program, or the n-th compute on
        posts: list[list[Instruction]] = [[]]
        groups: list[list[Instruction]] = [[]]
        for instruction in program:
            if isinstance(instruction, ir.Compute):
                posts.append([])
                groups.append([])
            elif isinstance(instruction, ir.Receive):
                x = instruction
                posts[-1].append(ir.PostReceive(x.stage, x.microbatch, x.peer, x.gradient))
            groups[-1].append(instruction)
        for post, group in zip(posts, groups, strict=True):
            yield from post
            yield from group

    return _rewrite(schedule, rewrite)


def without_updates(schedule: Schedule) -> Schedule:
    """Let all forwards see the weights of the start, and leave out updates.

    0F0 0B0 0U 0F1@1 0B1 0U   ->   0F0 0B0 0F1 0B1
    """

    def rewrite(program: Program) -> Iterator[Instruction]:
        for x in program:
            if isinstance(x, ir.Forward):
                yield ir.Forward(x.stage, x.microbatch, x.keep_graph)
            elif not isinstance(x, ir.UpdateWeights):
                yield x

    return _rewrite(schedule, rewrite)


def forwards_first(schedule: Schedule) -> Schedule:
    """Move every forward before every backward, both in the order they had."""
    return _rewrite(schedule, lambda program: sorted(program, key=is_backward_half))


def forward_half(schedule: Schedule) -> Schedule:
    """Keep the instructions that can run before any gradient exists."""
    return _rewrite(schedule, lambda program: (x for x in program if not is_backward_half(x)))


def backward_half(schedule: Schedule) -> Schedule:
    """Keep the instructions that need the outputs' gradients: the rest of `forward_half`."""
    return _rewrite(schedule, lambda program: (x for x in program if is_backward_half(x)))


def _rewrite(schedule: Schedule, rewrite: Callable[[Program], Iterable[Instruction]]) -> Schedule:
    return Schedule.of(map(rewrite, schedule.programs))
