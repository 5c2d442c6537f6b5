"""Predict what each stage holds in memory over time, by kind."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from penstock.schedules import ir
from penstock.schedules.memory import Kept, live_bytes
from penstock.trace.timeline import MemoryKind, MemorySample, Span, Timeline

from .engine import Edge


@dataclass(frozen=True, slots=True, kw_only=True)
class StageWeights:
    """Bytes of a stage's weights and of what belongs to them.

    `version_bytes` are those of a version that is kept beside the newest.
    """

    weight_bytes: int = 0
    gradient_bytes: int = 0
    optimizer_bytes: int = 0
    version_bytes: int = 0


def memory_of(
    timeline: Timeline,
    kept: Sequence[Kept],
    weights: Sequence[StageWeights],
    num_bytes: Mapping[Edge, int],
) -> tuple[MemorySample, ...]:
    """Return what each stage holds, whenever that changes, in the order of time.

    `kept` is what a stage keeps of one micro-batch, `num_bytes` what a message of each edge is.
    Weights, what the optimizer keeps and gradients that exist are there all the time: gradients
    from the stage's first backward on, as a step begins without any.  A message counts at its
    receiver, from when it was sent until it has been taken in.
    """
    found = [
        *_of_weights(timeline, weights),
        *_of_activations(timeline, kept),
        *_of_messages(timeline, num_bytes),
        *_of_versions(timeline, weights),
    ]
    return tuple(sorted(found, key=lambda sample: sample.time_s))


def _of_weights(timeline: Timeline, weights: Sequence[StageWeights]) -> Iterator[MemorySample]:
    start_s = timeline.start_s
    for stage, own in enumerate(weights):
        yield MemorySample(stage, start_s, own.weight_bytes, MemoryKind.WEIGHTS)
        yield MemorySample(stage, start_s, own.optimizer_bytes, MemoryKind.OPTIMIZER)
    seen: set[int] = set()
    for span in timeline.spans:
        stage = span.instruction.stage
        if isinstance(span.instruction, ir.ADDS_GRADIENTS) and stage not in seen:
            seen.add(stage)
            size = weights[stage].gradient_bytes
            yield MemorySample(stage, span.start_s, size, MemoryKind.GRADIENTS)


def _of_activations(timeline: Timeline, kept: Sequence[Kept]) -> Iterator[MemorySample]:
    """Yield what is kept for backwards, where it changes: at the end of an instruction."""
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
    for stage, of_stage in changes.items():
        total = 0
        for time_s, size in sorted(of_stage):
            total += size
            yield MemorySample(stage, time_s, total, MemoryKind.BOUNDARIES)


def _of_versions(timeline: Timeline, weights: Sequence[StageWeights]) -> Iterator[MemorySample]:
    """Yield what versions of weights beside the newest take: each until its last backward."""
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
    for stage, times_s in updated_s.items():
        until_s = [last_use.get((stage, n), time_s) for n, time_s in enumerate(times_s)]
        yield from _while_older(stage, times_s, until_s, weights[stage].version_bytes)


def _while_older(
    stage: int, since_s: Sequence[float], until_s: Sequence[float], size: int
) -> Iterator[MemorySample]:
    """Yield how much versions take that each are older than the newest from `since_s` on."""
    lasting = [(a, b) for a, b in zip(since_s, until_s, strict=True) if b > a]
    count = 0
    for time_s, change in sorted([*((a, 1) for a, _ in lasting), *((b, -1) for _, b in lasting)]):
        count += change
        yield MemorySample(stage, time_s, count * size, MemoryKind.VERSIONS)
