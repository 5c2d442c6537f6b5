"""Prove a lowered schedule before anything runs."""

from collections import Counter, defaultdict
from collections.abc import Container
from dataclasses import dataclass
from typing import assert_never

from penstock.errors import ScheduleError

from .ir import (
    Backward,
    CommitStatistics,
    Communication,
    Compute,
    Forward,
    Instruction,
    PostReceive,
    Receive,
    ReceiveActivation,
    ReceiveGradient,
    Recompute,
    ReduceGradients,
    Schedule,
    Send,
    SendActivation,
    SendGradient,
)
from .text import instruction_to_text, marked_text
from .transfers import Transfers, neighbours
from .walk import walk

Lane = tuple[type[Instruction], int, int]
"""(kind, stage, peer) of a send or receive; of a compute instruction, its stage once more."""


@dataclass(frozen=True, slots=True)
class Proof:
    """What is known of a verified schedule.

    `peak_live[stage]` is the most micro-batches whose forward `stage` has run and whose backward
    it has not: the bound on what it keeps, in micro-batches.
    """

    num_stages: int
    num_microbatches: int
    peak_live: tuple[int, ...]


def verify(schedule: Schedule, transfers: Transfers, *, max_live: int | None = None) -> Proof:
    """Prove that `schedule` is complete, ordered, free of deadlock and exact.

    Proved: every (stage, micro-batch) has one Forward and one Backward, all on one rank; values
    are received before use and sent once along each of `transfers`, in the same order; a
    Recompute stands between a Forward that dropped its graph and its Backward; the forwards and
    the backwards of a stage come in micro-batch order (the order in which an unsplit model
    accumulates gradients and updates buffers); receives are posted before they stand, gradients
    added up over replicas after the last backward, each at most once; no rank waits for ever; at
    most `max_live` micro-batches are alive on any stage.

    Raises:
        ScheduleError: one of these does not hold; shows the schedule with the spot marked.
    """
    num_stages, num_microbatches = schedule.num_stages, schedule.num_microbatches
    if not num_stages or not num_microbatches:
        raise ScheduleError(f"the schedule runs nothing: {schedule.num_ranks} empty programs")
    found = _microbatches(schedule)
    for kind in (Forward, Backward):
        for stage in range(num_stages):
            _check_complete(schedule, kind, stage, found[kind, stage, stage], num_microbatches)
    _check_ranks(schedule)
    _check_messages(schedule, found)
    producers, consumers = neighbours(transfers)
    stages = [
        _StageState(stage, producers.get(stage, []), consumers.get(stage, []), max_live)
        for stage in range(num_stages)
    ]
    for rank, program in enumerate(schedule.programs):
        for position, instruction in enumerate(program):
            problem = stages[instruction.stage].step(instruction)
            if problem is not None:
                raise ScheduleError(
                    f"rank {rank}, {instruction_to_text(instruction)}: {problem}.\n"
                    + marked_text(schedule, {rank: position})
                )
    for _ in walk(schedule):
        pass
    return Proof(num_stages, num_microbatches, tuple(stage.peak_live for stage in stages))


def _microbatches(schedule: Schedule) -> dict[Lane, list[int]]:
    """List the micro-batches of each lane, in order."""
    found: dict[Lane, list[int]] = defaultdict(list)
    for x in schedule.instructions:
        if isinstance(x, Communication):
            found[type(x), x.stage, x.peer].append(x.microbatch)
        elif isinstance(x, Compute):
            found[type(x), x.stage, x.stage].append(x.microbatch)
    return found


def _check_complete(
    schedule: Schedule, kind: type, stage: int, found: list[int], num_microbatches: int
) -> None:
    times = Counter(found)
    if wrong := [i for i in range(num_microbatches) if times[i] != 1]:
        raise ScheduleError(
            f"stage {stage} has {times[wrong[0]]} {kind.__name__} instructions for micro-batch "
            f"{wrong[0]}; it needs exactly one.\n{schedule}"
        )


def _check_ranks(schedule: Schedule) -> None:
    ranks: dict[int, int] = {}
    for rank, program in enumerate(schedule.programs):
        for stage in {instruction.stage for instruction in program}:
            if ranks.setdefault(stage, rank) != rank:
                raise ScheduleError(
                    f"stage {stage} runs on rank {ranks[stage]} and on rank {rank}; a stage "
                    f"lives on one rank.\n{schedule}"
                )


def _check_messages(schedule: Schedule, found: dict[Lane, list[int]]) -> None:
    for send, receive, what in (
        (SendActivation, ReceiveActivation, "activations"),
        (SendGradient, ReceiveGradient, "gradients"),
    ):
        edges = {(stage, peer) for kind, stage, peer in found if kind is send}
        edges |= {(peer, stage) for kind, stage, peer in found if kind is receive}
        for source, target in sorted(edges):
            there, here = found[send, source, target], found[receive, target, source]
            if there != here or len(set(there)) < len(there):
                raise ScheduleError(
                    f"stage {source} sends {what} of micro-batches {there} to stage {target}, "
                    f"which receives {here}; both must name the same micro-batches in the same "
                    f"order, each once.\n{schedule}"
                )


class _StageState:
    """What one stage has done so far; `step` says what is wrong with its next instruction."""

    def __init__(
        self, stage: int, producers: list[int], consumers: list[int], max_live: int | None
    ) -> None:
        self.peak_live = 0
        self._stage = stage
        self._max_live = max_live
        self._activations: dict[int, set[int]] = {p: set() for p in producers}
        self._gradients: dict[int, set[int]] = {c: set() for c in consumers}
        self._num_forwards = self._num_backwards = 0
        self._dropped: set[int] = set()
        self._posted: set[PostReceive] = set()
        self._is_committed = self._is_reduced = False

    def step(self, instruction: Instruction) -> str | None:  # noqa: C901, PLR0912 - one flat match
        match instruction:
            case SendActivation():
                return self._send(instruction, self._gradients, self._num_forwards)
            case ReceiveActivation():
                return self._receive(instruction, self._activations)
            case SendGradient():
                return self._send(instruction, self._activations, self._num_backwards)
            case ReceiveGradient():
                return self._receive(instruction, self._gradients)
            case Forward():
                return self._forward(instruction)
            case Recompute():
                return self._recompute(instruction)
            case Backward():
                return self._backward(instruction)
            case PostReceive():
                return self._post(instruction)
            case CommitStatistics():
                return self._commit()
            case ReduceGradients():
                return self._reduce()
            case _:
                assert_never(instruction)

    def _forward(self, forward: Forward) -> str | None:
        if self._is_committed:
            return "a forward runs after the statistics of its stage were committed"
        if forward.microbatch != self._num_forwards:
            return "the forwards of a stage must come in micro-batch order"
        for peer, received in self._activations.items():
            if forward.microbatch not in received:
                return _missing(ReceiveActivation(self._stage, forward.microbatch, peer))
        if not forward.keep_graph:
            self._dropped.add(forward.microbatch)
        self._num_forwards += 1
        live = self._num_forwards - self._num_backwards
        self.peak_live = max(self.peak_live, live)
        if self._max_live is not None and live > self._max_live:
            return f"its stage keeps {live} micro-batches alive, more than {self._max_live}"
        return None

    def _recompute(self, recompute: Recompute) -> str | None:
        if recompute.microbatch not in self._dropped:
            return "there is nothing to recompute: its Forward kept its graph or has not run"
        self._dropped.remove(recompute.microbatch)
        return None

    def _backward(self, backward: Backward) -> str | None:
        if self._is_reduced:
            return "a backward runs after the gradients of its stage were added up over replicas"
        if backward.microbatch >= self._num_forwards:
            return "its Forward has not run"
        if backward.microbatch != self._num_backwards:
            return (
                "the backwards of a stage must come in micro-batch order, or gradients would not "
                "add up in the order of the unsplit model"
            )
        if backward.microbatch in self._dropped:
            return "its Forward dropped its graph and no Recompute has rebuilt it"
        for peer, received in self._gradients.items():
            if backward.microbatch not in received:
                return _missing(ReceiveGradient(self._stage, backward.microbatch, peer))
        self._num_backwards += 1
        return None

    def _send(self, send: Send, peers: Container[int], num_done: int) -> str | None:
        if send.peer not in peers:
            return self._no_edge(send.peer, isinstance(send, SendActivation))
        if send.microbatch >= num_done:
            kind = Forward if isinstance(send, SendActivation) else Backward
            return f"its {kind.__name__} must come before it"
        return None

    def _receive(self, receive: Receive, received: dict[int, set[int]]) -> str | None:
        if receive.peer not in received:
            return self._no_edge(receive.peer, isinstance(receive, ReceiveGradient))
        received[receive.peer].add(receive.microbatch)
        return None

    def _no_edge(self, peer: int, is_producer: bool) -> str:
        producer, consumer = (self._stage, peer) if is_producer else (peer, self._stage)
        return f"stage {consumer} uses nothing of stage {producer}: there is no such edge"

    def _post(self, post: PostReceive) -> str | None:
        if post in self._posted:
            return "it is posted twice"
        self._posted.add(post)
        received = self._gradients if post.gradient else self._activations
        is_late = post.microbatch in received.get(post.peer, ())
        return "its receive stands before it" if is_late else None

    def _commit(self) -> str | None:
        if self._is_committed:
            return "its statistics are committed twice"
        self._is_committed = True
        return None

    def _reduce(self) -> str | None:
        if self._is_reduced:
            return "its gradients are added up twice"
        self._is_reduced = True
        return None


def _missing(receive: Receive) -> str:
    return f"{instruction_to_text(receive)} must come before it"
