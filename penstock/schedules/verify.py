"""Prove a lowered schedule before anything runs."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from penstock.errors import ScheduleError

from .ir import (
    Backward,
    CommitStatistics,
    Forward,
    Instruction,
    ReceiveActivation,
    ReceiveGradient,
    Recompute,
    Schedule,
    SendActivation,
    SendGradient,
)
from .passes import Edges
from .text import instruction_to_text, marked_text
from .walk import awaited_message, sent_message, walk

Pair = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Proof:
    """What is known of a verified schedule.

    `peak_live[stage]` is the most micro-batches whose forward `stage` has run and whose backward it
    has not: the bound on what it keeps, in micro-batches.
    """

    num_stages: int
    num_microbatches: int
    peak_live: tuple[int, ...]


def verify(
    schedule: Schedule, edges: Edges, *, training: bool = True, max_live: int | None = None
) -> Proof:
    """Prove that `schedule` is complete, ordered, free of deadlock and exact.

    Proved: every (stage, micro-batch) has one Forward and, if `training`, one Backward, all on one
    rank; values are received before use and sent once along each of `edges`, in the same order at
    both ends; a Recompute stands between a Forward that dropped its graph and its Backward; the
    forwards and the backwards of a stage come in micro-batch order (the order in which an unsplit
    model accumulates gradients and updates buffers); no rank waits for ever; at most `max_live`
    micro-batches are alive on any stage.

    Raises:
        ScheduleError: one of these does not hold; shows the schedule with the spot marked.
    """
    if not schedule.num_stages or not schedule.num_microbatches:
        raise ScheduleError(f"the schedule runs nothing: {schedule.num_ranks} empty programs")
    _check_complete(schedule, training)
    _check_messages(schedule)
    live = [0] * schedule.num_stages
    for rank, program in enumerate(schedule.programs):
        state = _RankState(edges)
        for position, instruction in enumerate(program):
            problem = state.step(instruction)
            if problem is None and max_live is not None and state.live[instruction.stage] > max_live:
                problem = f"keeps {state.live[instruction.stage]} micro-batches alive, more than {max_live}"
            if problem is not None:
                raise ScheduleError(
                    f"rank {rank}, {instruction_to_text(instruction)}: {problem}.\n"
                    + marked_text(schedule, {rank: position})
                )
        for stage, peak in state.peak.items():
            live[stage] = peak
    for _ in walk(schedule):
        pass
    return Proof(schedule.num_stages, schedule.num_microbatches, tuple(live))


def _check_complete(schedule: Schedule, training: bool) -> None:
    kinds = (Forward, Backward) if training else (Forward,)
    for kind in kinds:
        found = Counter((x.stage, x.microbatch) for _, x in schedule if isinstance(x, kind))
        for stage in range(schedule.num_stages):
            for microbatch in range(schedule.num_microbatches):
                if found[stage, microbatch] != 1:
                    raise ScheduleError(
                        f"stage {stage} has {found[stage, microbatch]} {kind.__name__} instructions for "
                        f"micro-batch {microbatch}; it needs exactly one.\n{schedule}"
                    )
    ranks: dict[int, int] = {}
    for rank, instruction in schedule:
        if ranks.setdefault(instruction.stage, rank) != rank:
            raise ScheduleError(
                f"stage {instruction.stage} runs on rank {ranks[instruction.stage]} and on rank {rank}; "
                f"a stage lives on one rank.\n{schedule}"
            )


def _check_messages(schedule: Schedule) -> None:
    sent: dict[tuple[bool, int, int], list[int]] = {}
    awaited: dict[tuple[bool, int, int], list[int]] = {}
    for _, instruction in schedule:
        for message, channels in (
            (sent_message(instruction), sent),
            (awaited_message(instruction), awaited),
        ):
            if message is not None:
                channels.setdefault(message[:3], []).append(message[3])
    for gradient, source, target in sorted(sent.keys() | awaited.keys()):
        there, here = sent.get((gradient, source, target), []), awaited.get((gradient, source, target), [])
        if there != here:
            what = "gradients" if gradient else "activations"
            raise ScheduleError(
                f"stage {source} sends {what} of micro-batches {there} to stage {target}, which receives {here}; "
                f"both must name the same micro-batches in the same order.\n{schedule}"
            )


@dataclass(slots=True)
class _RankState:
    """What one rank has done so far; `step` says what is wrong with the next instruction."""

    edges: Edges
    done: set[Instruction] = field(default_factory=set)
    dropped: set[Pair] = field(default_factory=set)
    live: Counter[int] = field(default_factory=Counter)
    peak: dict[int, int] = field(default_factory=dict)
    last_forward: dict[int, int] = field(default_factory=dict)
    last_backward: dict[int, int] = field(default_factory=dict)
    committed: set[int] = field(default_factory=set)

    def step(self, instruction: Instruction) -> str | None:
        problem = self._problem(instruction)
        self.done.add(instruction)
        return problem

    def _problem(self, instruction: Instruction) -> str | None:
        match instruction:
            case Forward():
                return self._forward(instruction)
            case Recompute(s, i):
                if (s, i) not in self.dropped:
                    return "there is nothing to recompute: its Forward kept its graph or has not run"
                self.dropped.remove((s, i))
            case Backward():
                return self._backward(instruction)
            case SendActivation(s, i, peer):
                if (s, peer) not in self.edges:
                    return f"stage {peer} uses nothing of stage {s}: there is no such edge"
                return self._missing(Forward(s, i), Forward(s, i, keep_graph=False))
            case SendGradient(s, i, peer):
                if (peer, s) not in self.edges:
                    return f"stage {s} uses nothing of stage {peer}: there is no such edge"
                return self._missing(Backward(s, i))
            case CommitStatistics(s):
                if s in self.committed:
                    return "its statistics are committed twice"
                self.committed.add(s)
            case ReceiveActivation() | ReceiveGradient():
                return None
        return None

    def _forward(self, forward: Forward) -> str | None:
        s, i = forward.stage, forward.microbatch
        if s in self.committed:
            return "a forward runs after the statistics of its stage were committed"
        if i != self.last_forward.get(s, -1) + 1:
            return "the forwards of a stage must come in micro-batch order"
        self.last_forward[s] = i
        if not forward.keep_graph:
            self.dropped.add((s, i))
        self.live[s] += 1
        self.peak[s] = max(self.peak.get(s, 0), self.live[s])
        return self._missing_any(ReceiveActivation(s, i, p) for p, c in sorted(self.edges) if c == s)

    def _backward(self, backward: Backward) -> str | None:
        s, i = backward.stage, backward.microbatch
        if i > self.last_forward.get(s, i):
            return "its Forward has not run"
        if i != self.last_backward.get(s, -1) + 1:
            return "the backwards of a stage must come in micro-batch order, so that gradients add up as unsplit"
        if (s, i) in self.dropped:
            return "its Forward dropped its graph and no Recompute has rebuilt it"
        self.last_backward[s] = i
        self.live[s] -= 1
        return self._missing_any(ReceiveGradient(s, i, c) for p, c in sorted(self.edges) if p == s)

    def _missing(self, *alternatives: Instruction) -> str | None:
        if self.done.isdisjoint(alternatives):
            return f"{instruction_to_text(alternatives[0])} must come before it"
        return None

    def _missing_any(self, needed: Iterable[Instruction]) -> str | None:
        return next((problem for x in needed if (problem := self._missing(x))), None)
