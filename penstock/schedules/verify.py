"""Prove a lowered schedule before anything runs."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from typing import assert_never

from penstock.errors import ScheduleError

from .ir import (
    Backward,
    CommitStatistics,
    Forward,
    Instruction,
    PostReceive,
    Program,
    ReceiveActivation,
    ReceiveGradient,
    Recompute,
    ReduceGradients,
    Schedule,
    SendActivation,
    SendGradient,
)
from .passes import Edges
from .text import instruction_to_text, marked_text
from .walk import Message, awaited_message, sent_message, walk

Pair = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Proof:
    """What is known of a verified schedule.

    `peak_live[stage]` is the most micro-batches whose forward `stage` has run and whose backward
    it has not: the bound on what it keeps, in micro-batches.
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
    model accumulates gradients and updates buffers); receives are posted before they stand,
    gradients added up over replicas after the last backward, each at most once; no rank waits for
    ever; at most `max_live` micro-batches are alive on any stage.

    Raises:
        ScheduleError: one of these does not hold; shows the schedule with the spot marked.
    """
    num_stages, num_microbatches = schedule.num_stages, schedule.num_microbatches
    if not num_stages or not num_microbatches:
        raise ScheduleError(f"the schedule runs nothing: {schedule.num_ranks} empty programs")
    _check_complete(schedule, training)
    _check_messages(schedule)
    live: dict[int, int] = {}
    for rank, program in enumerate(schedule.programs):
        live |= _check_order(schedule, rank, program, edges, max_live)
    for _ in walk(schedule):
        pass
    peaks = tuple(live[stage] for stage in range(num_stages))
    return Proof(num_stages, num_microbatches, peaks)


def _check_order(
    schedule: Schedule, rank: int, program: Program, edges: Edges, max_live: int | None
) -> dict[int, int]:
    """Check one program step by step; give the peak of live micro-batches of its stages."""
    state = _RankState(edges)
    for position, instruction in enumerate(program):
        problem = state.step(instruction)
        live = state.live[instruction.stage]
        if problem is None and max_live is not None and live > max_live:
            problem = f"its stage keeps {live} micro-batches alive, more than {max_live}"
        if problem is not None:
            raise ScheduleError(
                f"rank {rank}, {instruction_to_text(instruction)}: {problem}.\n"
                + marked_text(schedule, {rank: position})
            )
    return state.peak


def _check_complete(schedule: Schedule, training: bool) -> None:
    pairs = list(product(range(schedule.num_stages), range(schedule.num_microbatches)))
    for kind in (Forward, Backward) if training else (Forward,):
        found = Counter(
            (x.stage, x.microbatch) for x in schedule.instructions if isinstance(x, kind)
        )
        for stage, microbatch in pairs:
            if found[stage, microbatch] != 1:
                raise ScheduleError(
                    f"stage {stage} has {found[stage, microbatch]} {kind.__name__} instructions "
                    f"for micro-batch {microbatch}; it needs exactly one.\n{schedule}"
                )
    ranks: dict[int, int] = {}
    for rank, instruction in schedule:
        if ranks.setdefault(instruction.stage, rank) != rank:
            raise ScheduleError(
                f"stage {instruction.stage} runs on rank {ranks[instruction.stage]} and on rank "
                f"{rank}; a stage lives on one rank.\n{schedule}"
            )


def _check_messages(schedule: Schedule) -> None:
    sent: dict[tuple[bool, int, int], list[int]] = {}
    awaited: dict[tuple[bool, int, int], list[int]] = {}
    for instruction in schedule.instructions:
        if (message := sent_message(instruction)) is not None:
            sent.setdefault(message[:3], []).append(message[3])
        elif (message := awaited_message(instruction)) is not None:
            awaited.setdefault(message[:3], []).append(message[3])
    for gradient, source, target in sorted(sent.keys() | awaited.keys()):
        there, here = (
            sent.get((gradient, source, target), []),
            awaited.get((gradient, source, target), []),
        )
        if there != here:
            what = "gradients" if gradient else "activations"
            raise ScheduleError(
                f"stage {source} sends {what} of micro-batches {there} to stage {target}, which "
                f"receives {here}; both must name the same micro-batches in the same "
                f"order.\n{schedule}"
            )


class _RankState:
    """What one rank has done so far; `step` says what is wrong with the next instruction."""

    def __init__(self, edges: Edges) -> None:
        self.live: Counter[int] = Counter()
        self.peak: dict[int, int] = {}
        self._producers: dict[int, list[int]] = {}
        self._consumers: dict[int, list[int]] = {}
        for producer, consumer in sorted(edges):
            self._producers.setdefault(consumer, []).append(producer)
            self._consumers.setdefault(producer, []).append(consumer)
        self._received: set[Message] = set()
        self._posted: set[Message] = set()
        self._dropped: set[Pair] = set()
        self._committed: set[int] = set()
        self._reduced: set[int] = set()
        self._forwards: Counter[int] = Counter()
        self._backwards: Counter[int] = Counter()

    def step(self, instruction: Instruction) -> str | None:  # noqa: C901 - one flat match
        match instruction:
            case Forward(s, i, keep_graph):
                return self._forward(s, i, keep_graph)
            case Recompute(s, i):
                return self._recompute(s, i)
            case Backward(s, i):
                return self._backward(s, i)
            case SendActivation(s, i, peer):
                return self._activation(s, i, peer)
            case SendGradient(s, i, peer):
                return self._gradient(s, i, peer)
            case CommitStatistics(s):
                return self._commit(s)
            case PostReceive(s, i, peer, gradient):
                return self._post(s, i, peer, gradient)
            case ReduceGradients(s):
                return self._reduce(s)
            case ReceiveActivation(s, i, peer) | ReceiveGradient(s, i, peer):
                self._received.add((isinstance(instruction, ReceiveGradient), peer, s, i))
                return None
            case _:
                assert_never(instruction)

    def _forward(self, s: int, i: int, keep_graph: bool) -> str | None:
        if s in self._committed:
            return "a forward runs after the statistics of its stage were committed"
        if i != self._forwards[s]:
            return "the forwards of a stage must come in micro-batch order"
        self._forwards[s] += 1
        if not keep_graph:
            self._dropped.add((s, i))
        self.live[s] += 1
        self.peak[s] = max(self.peak.get(s, 0), self.live[s])
        return self._missing((False, p, s, i) for p in self._producers.get(s, ()))

    def _recompute(self, s: int, i: int) -> str | None:
        if (s, i) not in self._dropped:
            return "there is nothing to recompute: its Forward kept its graph or has not run"
        self._dropped.remove((s, i))
        return None

    def _backward(self, s: int, i: int) -> str | None:
        if s in self._reduced:
            return "a backward runs after the gradients of its stage were added up over replicas"
        if i >= self._forwards[s]:
            return "its Forward has not run"
        if i != self._backwards[s]:
            return (
                "the backwards of a stage must come in micro-batch order, or gradients would not "
                "add up in the order of the unsplit model"
            )
        if (s, i) in self._dropped:
            return "its Forward dropped its graph and no Recompute has rebuilt it"
        self._backwards[s] += 1
        self.live[s] -= 1
        return self._missing((True, c, s, i) for c in self._consumers.get(s, ()))

    def _activation(self, s: int, i: int, peer: int) -> str | None:
        if peer not in self._consumers.get(s, ()):
            return f"stage {peer} uses nothing of stage {s}: there is no such edge"
        return None if i < self._forwards[s] else "its Forward must come before it"

    def _gradient(self, s: int, i: int, peer: int) -> str | None:
        if peer not in self._producers.get(s, ()):
            return f"stage {s} uses nothing of stage {peer}: there is no such edge"
        return None if i < self._backwards[s] else "its Backward must come before it"

    def _commit(self, s: int) -> str | None:
        if s in self._committed:
            return "its statistics are committed twice"
        self._committed.add(s)
        return None

    def _post(self, s: int, i: int, peer: int, gradient: bool) -> str | None:
        message = (gradient, peer, s, i)
        if message in self._posted:
            return "it is posted twice"
        self._posted.add(message)
        return "its receive stands before it" if message in self._received else None

    def _reduce(self, s: int) -> str | None:
        if s in self._reduced:
            return "its gradients are added up twice"
        self._reduced.add(s)
        return None

    def _missing(self, needed: Iterable[Message]) -> str | None:
        for gradient, source, s, i in needed:
            if (gradient, source, s, i) not in self._received:
                receive = (ReceiveGradient if gradient else ReceiveActivation)(s, i, source)
                return f"{instruction_to_text(receive)} must come before it"
        return None
