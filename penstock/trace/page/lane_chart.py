"""The chart of lanes: what each rank did when; predicted above measured, on one time axis.

There is a box for each span, and fewer where there are many.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from penstock.schedules import ir
from penstock.trace.breakdown import waits_s
from penstock.trace.looks import LOOKS, WAIT, Look, look_of
from penstock.trace.timeline import Span, Timeline
from penstock.trace.units import Unit, bytes_text, number_text, percent_text, time_text, unit_for

from .charts import Layout, Trace, once_in_legend, rounded, rows_of, spread, stacked
from .page import Figure

MOST_BOXES = 9_000
"""Drawn of one timeline, so that a page stays small and quick."""
MOST_LANES = 48
_FEWEST_LANES = 2


@dataclass(frozen=True, slots=True)
class Box:
    """What is drawn of a span on the lane of its rank; seconds since the step's start."""

    span: Span
    look: Look
    start_s: float
    end_s: float
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Lanes:
    """What is drawn of a timeline: ranks that have a lane, their boxes, and what is left out."""

    ranks: tuple[int, ...]
    boxes: tuple[Box, ...]
    left_out: str = ""


def lanes_of(timeline: Timeline) -> Lanes:
    """Choose what to draw: ranks, evenly chosen, and of too many spans the longest."""
    fitting = MOST_BOXES * timeline.num_ranks // len(timeline.spans)
    ranks = spread(timeline.num_ranks, max(_FEWEST_LANES, min(MOST_LANES, fitting)))
    boxes = list(_boxes(timeline, set(ranks)))
    said = []
    if len(ranks) < timeline.num_ranks:
        said.append(f"{len(ranks)} of {timeline.num_ranks:,} ranks are drawn, evenly chosen")
    if len(boxes) > MOST_BOXES:
        said.append(f"the {MOST_BOXES:,} longest of {len(boxes):,} spans are drawn")
        boxes = sorted(boxes, key=lambda box: box.start_s - box.end_s)[:MOST_BOXES]
    return Lanes(ranks, tuple(boxes), "; ".join(said))


def _boxes(timeline: Timeline, ranks: set[int]) -> Iterator[Box]:
    """Yield a box for each span of these ranks in which something ran or a message moved."""
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
        if not look.fill:
            look, start_s = WAIT, span.end_s - wait_s
        if span.end_s > start_s:
            awaited = ir.awaited_message(span.instruction)
            num_bytes = span.num_bytes or (sent_bytes.get(awaited, 0) if awaited else 0)
            when_s = float(start_s - zero_s), float(span.end_s - zero_s)
            yield Box(span, look, *when_s, num_bytes)


_GAP_PX = 40
_LANE_HEIGHT = 0.84
_MOST_NUMBERED = 2_500
"""Boxes up to which micro-batch numbers are written into them."""
_ORDER = {look.name: n for n, look in enumerate([*LOOKS.values(), WAIT])}


def lane_chart(
    timelines: Mapping[str, Timeline], bubbles: Mapping[str, float], *, optimizer_s: float = 0.0
) -> Figure:
    """Draw timelines, by what they are; each has an axis of lanes, and all share that of time.

    `bubbles` are the shares of idle time, by the same names; `optimizer_s` is what each step takes
    beyond its timeline.
    """
    drawn = {title: lanes_of(timeline) for title, timeline in timelines.items()}
    steps_s = {title: float(timeline.step_s) for title, timeline in timelines.items()}
    unit = unit_for(max(steps_s.values()))
    most = max(len(lanes.ranks) for lanes in drawn.values())
    lane_px = 34 if most <= 8 else 24 if most <= 24 else 15
    heads = {
        title: f"<b>{title}</b>   step {time_text(step_s + optimizer_s)}, "
        f"bubble {percent_text(bubbles[title])}"
        for title, step_s in steps_s.items()
    }
    parts = [(heads[title], len(lanes.ranks) * lane_px) for title, lanes in drawn.items()]
    layout = stacked(parts, _GAP_PX, max(steps_s.values()))
    layout["uniformtext"] = {"mode": "hide", "minsize": 8}
    data: list[Trace] = []
    for n, (title, lanes) in enumerate(drawn.items(), start=1):
        layout[f"yaxis{n}"] |= rows_of([f"rank {rank}" for rank in lanes.ranks])
        layout["shapes"] += _grounds(len(lanes.ranks), steps_s[title] * unit.per_s, f"y{n}")
        data += _traces(lanes, unit, f"y{n}")
    data.sort(key=lambda trace: _ORDER[trace["name"]])
    notes = [f"{title}: {lanes.left_out}." for title, lanes in drawn.items() if lanes.left_out]
    return Figure("timeline", once_in_legend(data), layout, " ".join(notes).capitalize())


def _grounds(num_lanes: int, width: float, axis: str) -> Iterator[Layout]:
    """Yield the ground behind each lane: idle time."""
    ground: Layout = {"name": "ground", "type": "rect", "layer": "below", "line": {"width": 0}}
    ground |= {"xref": "x", "yref": axis, "x0": 0, "x1": rounded(width)}
    for lane in range(num_lanes):
        yield {**ground, "y0": lane - _LANE_HEIGHT / 2, "y1": lane + _LANE_HEIGHT / 2}


def _traces(lanes: Lanes, unit: Unit, axis: str) -> Iterator[Trace]:
    """Yield the boxes of each kind."""
    lane_of = {rank: n for n, rank in enumerate(lanes.ranks)}
    kinds: dict[Look, list[Box]] = defaultdict(list)
    for box in lanes.boxes:
        kinds[box.look].append(box)
    is_numbered = len(lanes.boxes) <= _MOST_NUMBERED
    stages = {box.span.instruction.stage for box in lanes.boxes}
    many = len(stages) > len(lanes.ranks)
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


def _microbatch(instruction: ir.Instruction) -> int | None:
    match instruction:
        case ir.CommitStatistics() | ir.ReduceGradients() | ir.UpdateWeights():
            return None
        case of_microbatch:
            return of_microbatch.microbatch


def _hover(box: Box, unit: Unit) -> str:
    """Say what a box is: short, as there are thousands."""
    start, duration = box.start_s * unit.per_s, (box.end_s - box.start_s) * unit.per_s
    when = f"{number_text(duration)} {unit.sign} from {number_text(start)}"
    number = _microbatch(box.span.instruction)
    of = "" if number is None else f", micro-batch {number}"
    size = f"<br>{bytes_text(box.num_bytes)}" if box.num_bytes else ""
    return f", stage {box.span.instruction.stage}{of}<br>rank {box.span.rank}, {when}{size}"
