"""A timeline as Chrome trace JSON: open it in Perfetto (ui.perfetto.dev) or chrome://tracing."""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from penstock.schedules import ir

from .looks import look_of
from .timeline import MemoryKind, Timeline

Event = dict[str, Any]
"""One event of the trace format; `ts` and `dur` are microseconds."""
Clock = Callable[[float], float]
"""Turns seconds of the timeline into microseconds since the step began."""


def to_chrome(timeline: Timeline) -> str:
    """Write `timeline` as one JSON object: a thread a rank, an arrow a message, a counter a stage.

    Categories are forward, recompute, backward, send, receive, statistics and reduce.
    """
    start_s = timeline.start_s

    def to_us(time_s: float) -> float:
        return float((time_s - start_s) * 1_000_000)

    events = [*_threads(timeline), *_slices(timeline, to_us)]
    events += [*_arrows(timeline, to_us), *_counters(timeline, to_us)]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _threads(timeline: Timeline) -> Iterator[Event]:
    yield {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": "Penstock"}}
    for rank in range(timeline.num_ranks):
        where = {"ph": "M", "pid": 0, "tid": rank}
        yield {**where, "name": "thread_name", "args": {"name": f"rank {rank}"}}
        yield {**where, "name": "thread_sort_index", "args": {"sort_index": rank}}


def _slices(timeline: Timeline, to_us: Clock) -> Iterator[Event]:
    for span in timeline.spans:
        category = look_of(span.instruction).name
        moved = {"bytes": span.num_bytes} if category == "send" else {}
        yield {
            "ph": "X",
            "pid": 0,
            "tid": span.rank,
            "cat": category,
            "name": _name(span.instruction),
            "ts": to_us(span.start_s),
            "dur": to_us(span.end_s) - to_us(span.start_s),
            "args": {**asdict(span.instruction), **moved},
        }


def _arrows(timeline: Timeline, to_us: Clock) -> Iterator[Event]:
    """Draw a flow from each send's start to the end of its receive."""
    sends = {ir.sent_message(span.instruction): span for span in timeline.spans}
    sends.pop(None, None)  # those that send nothing
    for number, span in enumerate(timeline.spans):
        send = sends.get(ir.awaited_message(span.instruction))
        if send is not None:
            flow = {"pid": 0, "id": number, "cat": "message", "name": "message"}
            yield {**flow, "ph": "s", "tid": send.rank, "ts": to_us(send.start_s)}
            yield {**flow, "ph": "f", "bp": "e", "tid": span.rank, "ts": to_us(span.end_s)}


_WORDS = {MemoryKind.ACTIVATIONS: "kept"}


def _counters(timeline: Timeline, to_us: Clock) -> Iterator[Event]:
    for sample in timeline.memory:
        yield {
            "ph": "C",
            "pid": 0,
            "name": f"stage {sample.stage} {_WORDS.get(sample.kind, sample.kind.value)} bytes",
            "ts": to_us(sample.time_s),
            "args": {"bytes": sample.kept_bytes},
        }


def _name(instruction: ir.Instruction) -> str:
    """Name an instruction in short: F3, SendActivation 3 to 1, CommitStatistics."""
    if isinstance(instruction, ir.Compute):
        return f"{look_of(instruction).letter}{instruction.microbatch}"
    kind = type(instruction).__name__
    if not isinstance(instruction, ir.Communication | ir.PostReceive):
        return kind
    way = "to" if isinstance(instruction, ir.Send) else "from"
    return f"{kind} {instruction.microbatch} {way} {instruction.peer}"
