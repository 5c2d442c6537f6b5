"""Predict the memory of each stage over time, by kind."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from penstock.schedules import ir
from penstock.schedules.memory import Kept, live_bytes
from penstock.trace.timeline import MemoryKind, MemorySample, Span, Timeline

from .engine import Edge


@dataclass(frozen=True, slots=True, kw_only=True)
class StageWeights:
    """Bytes of a stage's weights, gradients and optimizer state."""

    weight_bytes: int = 0
    gradient_bytes: int = 0
    optimizer_bytes: int = 0
    version_bytes: int = 0
    """The bytes of one version of the weights beside the newest."""


def memory_of(
    timeline: Timeline,
    kept: Sequence[Kept],
    weights: Sequence[StageWeights],
    num_bytes: Mapping[Edge, int],
) -> tuple[MemorySample, ...]:
    """Return a sample for each change of each stage's memory, in the order of time.

    `kept` are the sizes of a stage for one micro-batch, `num_bytes` the size of a message of each
    edge.  Weights and optimizer state are there all the time.  Gradients exist from the stage's
    first backward on.  A message counts at its receiver, from its send to the end of its receive.
    """
    samples = [
        *_of_weights(timeline, weights),
        *_of_activations(timeline, kept),
        *_of_messages(timeline, num_bytes),
        *_of_versions(timeline, weights),
    ]
    return tuple(sorted(samples, key=lambda sample: sample.time_s))


def _of_weights(timeline: Timeline, weights: Sequence[StageWeights]) -> Iterator[MemorySample]:
    """Yield weights and optimizer state at the start, gradients at each stage's first backward."""
    start_s = timeline.start_s
    for stage, sizes in enumerate(weights):
        yield MemorySample(stage, start_s, sizes.weight_bytes, MemoryKind.WEIGHTS)
        yield MemorySample(stage, start_s, sizes.optimizer_bytes, MemoryKind.OPTIMIZER)
    seen: set[int] = set()
    for span in timeline.spans:
        stage = span.instruction.stage
        if isinstance(span.instruction, ir.ADDS_GRADIENTS) and stage not in seen:
            seen.add(stage)
            size = weights[stage].gradient_bytes
            yield MemorySample(stage, span.start_s, size, MemoryKind.GRADIENTS)


def _of_activations(timeline: Timeline, kept: Sequence[Kept]) -> Iterator[MemorySample]:
    """Yield the activation memory after each instruction that changes it."""
    of_stage: dict[int, list[Span]] = {}
    for span in timeline.spans:
        of_stage.setdefault(span.instruction.stage, []).append(span)
    for stage, spans in of_stage.items():
        program = tuple(span.instruction for span in spans)
        after = [0, *live_bytes(program, kept)]
        for span, (before, now) in zip(spans, pairwise(after), strict=True):
            if now != before:
                yield MemorySample(stage, span.end_s, now)


def _of_messages(timeline: Timeline, num_bytes: Mapping[Edge, int]) -> Iterator[MemorySample]:
    ranks = timeline.schedule.ranks
    changes: dict[int, list[tuple[float, int]]] = {}
    for span in timeline.spans:
        x = span.instruction
        if isinstance(x, ir.Communication) and ranks[x.stage] != ranks[x.peer]:
            size = num_bytes.get(x.message[:3], 0)
            change = (span.start_s, size) if isinstance(x, ir.Send) else (span.end_s, -size)
            changes.setdefault(x.message[2], []).append(change)
    yield from _summed(changes, MemoryKind.BOUNDARIES)


def _of_versions(timeline: Timeline, weights: Sequence[StageWeights]) -> Iterator[MemorySample]:
    """Yield the bytes of versions beside the newest: each from its update to its last backward."""
    last_use: dict[tuple[int, int], float] = {}
    version_of: dict[tuple[int, int], int] = {}
    updated_s: dict[int, list[float]] = {}
    for span in timeline.spans:
        x = span.instruction
        if isinstance(x, ir.Forward):
            version_of[x.stage, x.microbatch] = x.version
        elif isinstance(x, ir.ADDS_GRADIENTS):
            last_use[x.stage, version_of.get((x.stage, x.microbatch), 0)] = span.end_s
        elif isinstance(x, ir.UpdateWeights):
            updated_s.setdefault(x.stage, []).append(span.end_s)
    changes: dict[int, list[tuple[float, int]]] = {}
    for stage, times_s in updated_s.items():
        size = weights[stage].version_bytes
        # The n-th update makes version n old, which then lives on until its last use.
        uses_s = [(old_s, last_use.get((stage, n), old_s)) for n, old_s in enumerate(times_s)]
        lives_s = [(old_s, end_s) for old_s, end_s in uses_s if end_s > old_s]
        changes[stage] = [c for old_s, end_s in lives_s for c in ((old_s, size), (end_s, -size))]
    yield from _summed(changes, MemoryKind.VERSIONS)


def _summed(
    changes: Mapping[int, list[tuple[float, int]]], kind: MemoryKind
) -> Iterator[MemorySample]:
    """Add up (time, bytes) changes of each stage, in the order of time."""
    for stage, of_stage in changes.items():
        total = 0
        for time_s, size in sorted(of_stage):
            total += size
            yield MemorySample(stage, time_s, total, kind)
