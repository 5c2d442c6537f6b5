"""The chart of lanes: a box for each span on the lane of its rank, predicted above measured.

Both share one time axis.  Of too many spans only the longest have a box.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from penstock.schedules import ir
from penstock.trace.breakdown import waits_s
from penstock.trace.looks import LOOKS, WAIT, Look, look_of
from penstock.trace.timeline import Span, Timeline, message_spans
from penstock.trace.units import (
    Unit,
    bytes_text,
    count_text,
    number_text,
    percent_text,
    time_text,
    unit_for,
)

from .charts import Layout, Trace, once_in_legend, rounded, rows_of, spread, stacked
from .page import Figure

MOST_BOXES = 9_000
"""Boxes of one timeline, so that a page stays small and quick."""
MOST_LANES = 48
"""Lanes of one timeline."""
_FEWEST_LANES = 2
"""Lanes of a timeline however many spans they have."""


@dataclass(frozen=True, slots=True)
class Box:
    """A span as a box on the lane of its rank; seconds since the step's start."""

    span: Span
    look: Look
    start_s: float
    end_s: float
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Lanes:
    """The ranks of a timeline that have a lane, and their boxes."""

    ranks: tuple[int, ...]
    boxes: tuple[Box, ...]
    left_out: str = ""
    """A note of the ranks and spans that are not drawn."""


def lanes_of(timeline: Timeline) -> Lanes:
    """Choose ranks, evenly, and of too many spans the longest."""
    fitting = MOST_BOXES * timeline.num_ranks // len(timeline.spans)
    ranks = spread(timeline.num_ranks, max(_FEWEST_LANES, min(MOST_LANES, fitting)))
    boxes = list(_boxes(timeline, set(ranks)))
    notes = []
    if len(ranks) < timeline.num_ranks:
        notes.append(f"{len(ranks)} of {timeline.num_ranks:,} ranks are drawn, evenly chosen")
    if len(boxes) > MOST_BOXES:
        notes.append(f"the {MOST_BOXES:,} longest of {len(boxes):,} spans are drawn")
        boxes = sorted(boxes, key=lambda box: box.start_s - box.end_s)[:MOST_BOXES]
    return Lanes(ranks, tuple(boxes), "; ".join(notes))


def _boxes(timeline: Timeline, ranks: set[int]) -> Iterator[Box]:
    """Yield a box for each span of these ranks that ran layers or moved a message."""
    zero_s = timeline.start_s
    sent_bytes = {
        ir.sent_message(span.instruction): span.num_bytes
        for span in timeline.spans
        if span.num_bytes
    }
    for span, wait_s in zip(timeline.spans, waits_s(timeline), strict=True):
        if span.rank not in ranks:
            continue
        look, start_s = look_of(span.instruction), span.start_s
        if not look.fill:  # of a send or receive only the time in which its message moves
            look, start_s = WAIT, span.end_s - wait_s
        if span.end_s > start_s:
            awaited = ir.awaited_message(span.instruction)
            num_bytes = span.num_bytes or (sent_bytes.get(awaited, 0) if awaited else 0)
            when_s = float(start_s - zero_s), float(span.end_s - zero_s)
            yield Box(span, look, *when_s, num_bytes)


_GAP_PX = 40
"""Pixels between two timelines."""
_LANE_HEIGHT = 0.84
"""The height of a box as a share of its row."""
_MOST_NUMBERED = 2_500
"""Boxes up to which micro-batch numbers are written into them."""
_MESSAGES = "messages"
_MOST_ARROWS = 1_000
"""Arrows of one timeline."""
_FEW_ARROWS = 80
"""Arrows up to which they are shown at once; more appear after a click in the legend."""
_ORDER = {name: n for n, name in enumerate([*(x.name for x in LOOKS.values()), WAIT.name])}
_ORDER[_MESSAGES] = len(_ORDER)
"""The order of kinds in the legend."""


def lane_chart(
    timelines: Mapping[str, Timeline], bubbles: Mapping[str, float], *, optimizer_s: float = 0.0
) -> Figure:
    """Draw timelines by title; each has an axis of lanes, and all share the time axis.

    `bubbles` are the shares of idle time by title, `optimizer_s` the optimizer's time after each
    timeline.
    """
    # 1. Choose lanes and boxes; lanes are lower where there are many.
    drawn = {title: lanes_of(timeline) for title, timeline in timelines.items()}
    steps_s = {title: float(timeline.step_s) for title, timeline in timelines.items()}
    unit = unit_for(max(steps_s.values()))
    most = max(len(lanes.ranks) for lanes in drawn.values())
    lane_px = 34 if most <= 8 else 24 if most <= 24 else 15
    # 2. Put the timelines one above the other, each with its head.
    heads = {
        title: f"<b>{title}</b>   step {time_text(step_s + optimizer_s)}, "
        f"bubble {percent_text(bubbles[title])}"
        for title, step_s in steps_s.items()
    }
    parts = [(heads[title], len(lanes.ranks) * lane_px) for title, lanes in drawn.items()]
    layout = stacked(parts, _GAP_PX, max(steps_s.values()))
    layout["uniformtext"] = {"mode": "hide", "minsize": 8}
    # 3. Draw lanes and boxes; the legend has all kinds in one order.
    data: list[Trace] = []
    for n, (title, lanes) in enumerate(drawn.items(), start=1):
        layout[f"yaxis{n}"] |= rows_of([f"rank {rank}" for rank in lanes.ranks])
        # the ground behind each lane is idle time
        ground: Layout = {"name": "ground", "type": "rect", "layer": "below", "line": {"width": 0}}
        ground |= {"xref": "x", "yref": f"y{n}"}
        ground |= {"x0": 0, "x1": rounded(steps_s[title] * unit.per_s)}
        for lane in range(len(lanes.ranks)):
            ends = {"y0": lane - _LANE_HEIGHT / 2, "y1": lane + _LANE_HEIGHT / 2}
            layout["shapes"].append({**ground, **ends})
        data += _traces(lanes, unit, f"y{n}")
        data += _arrows(timelines[title], lanes, unit, f"y{n}")
    data.sort(key=lambda trace: _ORDER[trace["name"]])
    notes = [f"{title}: {lanes.left_out}." for title, lanes in drawn.items() if lanes.left_out]
    told = "; ".join(
        f"{title}: step {time_text(step_s + optimizer_s)}, bubble {percent_text(bubbles[title])}, "
        f"{count_text(timelines[title].num_ranks, 'rank')}"
        for title, step_s in steps_s.items()
    )
    label = f"Timeline, {told}. Keys: plus and minus zoom, arrows move, 0 shows the whole step."
    note = " ".join(notes).capitalize()
    return Figure("timeline", once_in_legend(data), layout, note, label=label)


def _traces(lanes: Lanes, unit: Unit, axis: str) -> Iterator[Trace]:
    # 1. Group the boxes by kind.
    lane_of = {rank: n for n, rank in enumerate(lanes.ranks)}
    kinds: dict[Look, list[Box]] = defaultdict(list)
    for box in lanes.boxes:
        kinds[box.look].append(box)
    is_numbered = len(lanes.boxes) <= _MOST_NUMBERED
    stages = {box.span.instruction.stage for box in lanes.boxes}
    many = len(stages) > len(lanes.ranks)
    # 2. Draw each kind as one trace; few boxes have borders and micro-batch numbers.
    for look, boxes in kinds.items():
        trace: Trace = {
            "type": "bar",
            "orientation": "h",
            "name": look.name,
            "legendgroup": look.name,
            "yaxis": axis,
            "y": [lane_of[box.span.rank] for box in boxes],
            "base": [rounded(box.start_s * unit.per_s) for box in boxes],
            "x": [rounded((box.end_s - box.start_s) * unit.per_s) for box in boxes],
            "width": _LANE_HEIGHT,
            "marker": {"color": look.fill, "line": {"width": 0.7 if is_numbered else 0}},
            "customdata": [_hover(box, unit) for box in boxes],
            "hovertemplate": f"<b>{look.name}</b>%{{customdata}}<extra></extra>",
        }
        if is_numbered and look.letter:
            works = [box.span.instruction for box in boxes]
            trace["text"] = [f"{work.stage}:" * many + f"{_microbatch(work)}" for work in works]
            trace |= {"textposition": "inside", "insidetextanchor": "middle", "textangle": 0}
            trace["insidetextfont"] = {"color": look.ink or "#222222", "size": 11}
        yield trace


def _arrows(timeline: Timeline, lanes: Lanes, unit: Unit, axis: str) -> Iterator[Trace]:
    """Yield the messages between lanes as arrows: from the start of a send to its arrival.

    rank 0   [F0]╲[F1]╲
    rank 1        ╲[F0]╲[F1]
    """
    # 1. Find the messages between drawn ranks, evenly chosen if there are many.
    lane_of = {rank: n for n, rank in enumerate(lanes.ranks)}
    pairs = [
        (send, receive)
        for send, receive in message_spans(timeline)
        if send.rank != receive.rank and {send.rank, receive.rank} <= lane_of.keys()
    ]
    pairs = [pairs[n] for n in spread(len(pairs), _MOST_ARROWS)]
    if not pairs:
        return
    # 2. Draw all as one line with gaps; a head points along the last piece.
    x: list[float | None] = []
    y: list[float | None] = []
    told: list[str] = []
    zero_s = timeline.start_s  # of all spans, so once
    for send, receive in pairs:
        source, target = lane_of[send.rank], lane_of[receive.rank]
        edge = _LANE_HEIGHT / 2 if target > source else -_LANE_HEIGHT / 2
        times_s = send.start_s - zero_s, receive.end_s - zero_s
        x += [*(rounded(float(time_s) * unit.per_s) for time_s in times_s), None]
        y += [source + edge, target - edge, None]
        told += [_message(send, receive, unit)] * 3
    yield {
        "type": "scatter",
        "mode": "lines+markers",
        "name": _MESSAGES,
        "legendgroup": _MESSAGES,
        "visible": True if len(pairs) <= _FEW_ARROWS else "legendonly",
        "yaxis": axis,
        "x": x,
        "y": y,
        "line": {"width": 1},
        "marker": {"symbol": "arrow", "size": [0, 8, 0] * len(pairs), "angleref": "previous"},
        "customdata": told,
        "hovertemplate": "<b>message</b>%{customdata}<extra></extra>",
    }


def _message(send: Span, receive: Span, unit: Unit) -> str:
    """Describe a message: its content, ranks, duration and bytes."""
    what = "activation" if isinstance(send.instruction, ir.SendActivation) else "gradient"
    took = number_text(float(receive.end_s - send.start_s) * unit.per_s)
    size = f", {bytes_text(send.num_bytes)}" if send.num_bytes else ""
    return (
        f", {what} of micro-batch {_microbatch(send.instruction)}<br>rank {send.rank} to rank "
        f"{receive.rank}, {took} {unit.sign} after its send began{size}"
    )


def _microbatch(instruction: ir.Instruction) -> int | None:
    match instruction:
        case ir.CommitStatistics() | ir.ReduceGradients() | ir.UpdateWeights():
            return None
        case of_microbatch:
            return of_microbatch.microbatch


def _hover(box: Box, unit: Unit) -> str:
    """Describe a box in few characters, as there are thousands."""
    start, duration = box.start_s * unit.per_s, (box.end_s - box.start_s) * unit.per_s
    when = f"{number_text(duration)} {unit.sign} from {number_text(start)}"
    number = _microbatch(box.span.instruction)
    of = "" if number is None else f", micro-batch {number}"
    size = f"<br>{bytes_text(box.num_bytes)}" if box.num_bytes else ""
    return f", stage {box.span.instruction.stage}{of}<br>rank {box.span.rank}, {when}{size}"
