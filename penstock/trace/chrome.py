"""A timeline as Chrome trace JSON: open it in Perfetto (ui.perfetto.dev) or chrome://tracing."""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from penstock.schedules import ir

from .looks import look_of
from .timeline import MemoryKind, Timeline, message_spans

Event = dict[str, Any]
"""One event of the trace format; `ts` and `dur` are microseconds."""
Clock = Callable[[float], float]
"""Converts seconds of the timeline to microseconds since the step began."""
_WORDS = {MemoryKind.ACTIVATIONS: "kept"}
"""The names of counters that differ from those of their kinds."""


def to_chrome(timeline: Timeline) -> str:
    """Write `timeline` as one JSON object: a thread a rank, an arrow a message, a counter a stage.

    Categories are forward, recompute, backward, send, receive, statistics and reduce.
    """
    start_s = timeline.start_s

    def to_us(time_s: float) -> float:
        return float((time_s - start_s) * 1_000_000)

    # phases: M names, X slices, s and f the ends of a flow, C counters
    process: Event = {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": "Penstock"}}
    events = [process]
    for rank in range(timeline.num_ranks):
        thread = {"ph": "M", "pid": 0, "tid": rank}
        events.append({**thread, "name": "thread_name", "args": {"name": f"rank {rank}"}})
        events.append({**thread, "name": "thread_sort_index", "args": {"sort_index": rank}})
    events += [*_slices(timeline, to_us), *_arrows(timeline, to_us)]
    for sample in timeline.memory:
        kind = _WORDS.get(sample.kind, sample.kind.value)
        counter = {"ph": "C", "pid": 0, "name": f"stage {sample.stage} {kind} bytes"}
        values = {"ts": to_us(sample.time_s), "args": {"bytes": sample.kept_bytes}}
        events.append({**counter, **values})
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


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
    """Yield a flow from each send's start to the end of its receive."""
    for number, (send, receive) in enumerate(message_spans(timeline)):
        flow = {"pid": 0, "id": number, "cat": "message", "name": "message"}
        yield {**flow, "ph": "s", "tid": send.rank, "ts": to_us(send.start_s)}
        yield {**flow, "ph": "f", "bp": "e", "tid": receive.rank, "ts": to_us(receive.end_s)}


def _name(instruction: ir.Instruction) -> str:
    """Name an instruction in short: F3, SendActivation 3 to 1, CommitStatistics."""
    if isinstance(instruction, ir.Compute):
        return f"{look_of(instruction).letter}{instruction.microbatch}"
    kind = type(instruction).__name__
    if not isinstance(instruction, ir.Communication | ir.PostReceive):
        return kind
    way = "to" if isinstance(instruction, ir.Send) else "from"
    return f"{kind} {instruction.microbatch} {way} {instruction.peer}"
