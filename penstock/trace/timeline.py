"""Timelines: one value for the executor's measured steps and the simulator's predicted ones."""

import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from penstock.schedules.ir import Instruction, Schedule, awaited_message, sent_message
from penstock.schedules.text import parse_instruction

if TYPE_CHECKING:
    from .breakdown import Breakdown


class Span(NamedTuple):  # made a million times over, in half the time of a frozen dataclass
    """One instruction on one rank, from `start_s` to `end_s` (seconds since the step began)."""

    rank: int
    instruction: Instruction
    start_s: float
    end_s: float
    num_bytes: int = 0
    """The bytes of a send's tensors, if known."""

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


class MemoryKind(Enum):
    """The kinds of memory."""

    ACTIVATIONS = "activations"
    """Activations for backwards; measured ones include older versions of weights."""
    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    BOUNDARIES = "boundaries"
    """Messages in flight."""
    VERSIONS = "versions"
    """Versions of weights beside the newest."""


@dataclass(frozen=True, slots=True)
class MemorySample:
    """Bytes of one kind on `stage` from `time_s` on, until its next sample of the kind."""

    stage: int
    time_s: float
    kept_bytes: int
    kind: MemoryKind = MemoryKind.ACTIVATIONS


def most_bytes(memory: Sequence[MemorySample], stages: Collection[int]) -> int:
    """Return the peak bytes of some stages together, over all kinds."""
    held: dict[tuple[int, MemoryKind], int] = {}
    total = most = 0
    samples = (sample for sample in memory if sample.stage in stages)
    for sample in sorted(samples, key=lambda sample: sample.time_s):
        place = sample.stage, sample.kind
        total += sample.kept_bytes - held.get(place, 0)
        held[place] = sample.kept_bytes
        most = max(most, total)
    return most


@dataclass(frozen=True, slots=True)
class Timeline:
    """The spans of one step, in order of rank and start, and the memory of its stages."""

    spans: tuple[Span, ...]
    memory: tuple[MemorySample, ...] = ()
    """Empty unless the step was traced with Trace.MEMORY, or predicted."""

    @property
    def num_ranks(self) -> int:
        return 1 + max((span.rank for span in self.spans), default=-1)

    @property
    def start_s(self) -> float:
        return min((span.start_s for span in self.spans), default=0.0)

    @property
    def end_s(self) -> float:
        return max((span.end_s for span in self.spans), default=0.0)

    @property
    def step_s(self) -> float:
        """Seconds from the first instruction's start to the last one's end, over all ranks."""
        return self.end_s - self.start_s

    @property
    def schedule(self) -> Schedule:
        """The programs of these spans, in the order they ran."""
        programs: list[list[Instruction]] = [[] for _ in range(self.num_ranks)]
        for span in self.spans:
            programs[span.rank].append(span.instruction)
        return Schedule(tuple(tuple(program) for program in programs))

    @property
    def bubble(self) -> float:
        """Share of the ranks' time in which they were idle."""
        from .breakdown import bubble  # a breakdown knows timelines, not the other way round

        return bubble(self)

    def breakdown(self) -> "Breakdown":
        """Divide each rank's time into work, waiting for messages and bubble; printable."""
        from .breakdown import breakdown  # a breakdown knows timelines, not the other way round

        return breakdown(self)

    def peak_bytes(self) -> dict[int, int]:
        """Return the peak activation memory of each stage; empty unless memory was traced."""
        peak: dict[int, int] = {}
        for sample in self.memory:
            if sample.kind is MemoryKind.ACTIVATIONS:
                peak[sample.stage] = max(peak.get(sample.stage, 0), sample.kept_bytes)
        return peak

    def peak_bytes_of_ranks(self) -> tuple[int, ...]:
        """Return the peak memory of each rank, over all kinds that the timeline has."""
        return tuple(most_bytes(self.memory, stages) for stages in self._stages_of_ranks())

    def peak_bytes_by_kind(self) -> dict[MemoryKind, tuple[int, ...]]:
        """Return the peak memory of each rank, for each kind by itself; to compare two timelines.

        A step that was traced with Trace.MEMORY has activations, and the weights, buffers and
        gradients that its stages hold; a predicted one has all kinds.
        """
        stages = self._stages_of_ranks()
        of_kind: dict[MemoryKind, list[MemorySample]] = {}
        for sample in self.memory:
            of_kind.setdefault(sample.kind, []).append(sample)
        return {
            kind: tuple(most_bytes(of_kind[kind], of_rank) for of_rank in stages)
            for kind in MemoryKind
            if kind in of_kind
        }

    def _stages_of_ranks(self) -> list[set[int]]:
        stages: list[set[int]] = [set() for _ in range(self.num_ranks)]
        for span in self.spans:
            stages[span.rank].add(span.instruction.stage)
        return stages

    def moved_bytes(self) -> dict[tuple[int, int], int]:
        """Return the bytes sent from one stage to another, over the step.

        Activations go to the higher stage, gradients to the lower one.
        """
        moved: dict[tuple[int, int], int] = {}
        for span in self.spans:
            message = sent_message(span.instruction)
            if message is not None:
                _, source, target, _ = message
                moved[source, target] = moved.get((source, target), 0) + span.num_bytes
        return moved

    def to_json(self) -> str:
        """Write the timeline as one line of JSON; `Timeline.from_json` reads it back."""
        return json.dumps(
            {
                "spans": [
                    [s.rank, str(s.instruction), s.start_s, s.end_s, s.num_bytes]
                    for s in self.spans
                ],
                "memory": [[m.stage, m.time_s, m.kept_bytes, m.kind.value] for m in self.memory],
            },
            default=float,
        )

    @classmethod
    def from_json(cls, text: str) -> "Timeline":
        """Read the text of `to_json`."""
        data = json.loads(text)
        return cls(
            spans=tuple(
                Span(rank, parse_instruction(text), *rest) for rank, text, *rest in data["spans"]
            ),
            memory=tuple(
                MemorySample(stage, time_s, size, *map(MemoryKind, kind))
                for stage, time_s, size, *kind in data["memory"]
            ),
        )


def message_spans(timeline: Timeline) -> Iterator[tuple[Span, Span]]:
    """Yield the send and the receive of each message that has both, in the order of receives."""
    sends = {sent_message(span.instruction): span for span in timeline.spans}
    sends.pop(None, None)  # spans that send nothing
    for receive in timeline.spans:
        send = sends.get(awaited_message(receive.instruction))
        if send is not None:
            yield send, receive
