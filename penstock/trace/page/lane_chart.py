"""The chart of lanes: what each rank did when; predicted above measured, on one time axis.

There is a box for each span, and fewer where there are many.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from penstock.schedules import ir
from penstock.trace.breakdown import waits_s
from penstock.trace.looks import DRAWN, LOOKS, WAIT, Look, look_of
from penstock.trace.timeline import Span, Timeline
from penstock.trace.units import Unit, bytes_text, number_text, percent_text, time_text, unit_for

from .markup import Figure, Trace, caption, layout_of, rounded

MOST_BOXES = 9_000
"""Drawn of one timeline, so that a page stays small and quick."""
MOST_LANES = 48
_LANES_OF_MANY = 24
"""Where spans are merged, so that each lane keeps hundreds of boxes."""


_MOST_PARTS = 1_000
"""Of a step, where spans are merged: a part is about as wide as a pixel."""
_LEAST_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class Box:
    """What is drawn on the lane of a rank; seconds since the step's start.

    `stage` and `microbatch` are -1 where there is none.  A box that stands for `num_spans` spans
    has the look of what took most of its time, and was busy for this `share` of it.
    """

    rank: int
    look: Look
    start_s: float
    end_s: float
    stage: int = -1
    microbatch: int = -1
    num_bytes: int = 0
    num_spans: int = 1
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class Lanes:
    """What is drawn of a timeline: ranks that have a lane, their boxes, and what is left out."""

    ranks: tuple[int, ...]
    boxes: tuple[Box, ...]
    left_out: str = ""


def lanes_of(timeline: Timeline) -> Lanes:
    """Choose what to draw of a timeline."""
    ranks = spread(timeline.num_ranks, MOST_LANES)
    boxes = tuple(_boxes(timeline, set(ranks)))
    said = []
    if len(boxes) > MOST_BOXES or _are_thin(boxes, timeline.step_s):
        ranks = tuple(ranks[n] for n in spread(len(ranks), _LANES_OF_MANY))
        boxes = tuple(box for box in boxes if box.rank in set(ranks))
    if len(ranks) < timeline.num_ranks:
        said.append(f"{len(ranks)} of {timeline.num_ranks:,} ranks are drawn, evenly chosen")
    if len(boxes) > MOST_BOXES or _are_thin(boxes, timeline.step_s):
        many, num_parts = len(boxes), min(_MOST_PARTS, MOST_BOXES // len(ranks))
        boxes = tuple(_merged(boxes, timeline.step_s / num_parts))
        said.append(
            f"{many:,} spans are merged: each 1/{num_parts} of the step shows what took most of "
            "it, paler the longer it was idle"
        )
    return Lanes(ranks, boxes, "; ".join(said))


def spread(number: int, most: int) -> tuple[int, ...]:
    """Choose at most `most` of so many, evenly, the first and the last among them."""
    if number <= most:
        return tuple(range(number))
    return tuple(round(n * (number - 1) / (most - 1)) for n in range(most))


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
            num_bytes = span.num_bytes or _received(span, sent_bytes)
            yield _box(span, look, (start_s - zero_s, span.end_s - zero_s), num_bytes)


def _received(span: Span, sent_bytes: dict[ir.Message | None, int]) -> int:
    awaited = ir.awaited_message(span.instruction)
    return 0 if awaited is None else sent_bytes.get(awaited, 0)


def _box(span: Span, look: Look, when_s: tuple[float, float], num_bytes: int) -> Box:
    match span.instruction:
        case ir.CommitStatistics() | ir.ReduceGradients() | ir.UpdateWeights():
            microbatch = -1
        case of_microbatch:
            microbatch = of_microbatch.microbatch
    return Box(
        rank=span.rank,
        look=look,
        start_s=float(when_s[0]),
        end_s=float(when_s[1]),
        stage=span.instruction.stage,
        microbatch=microbatch,
        num_bytes=num_bytes,
    )


def _are_thin(boxes: Sequence[Box], step_s: float) -> bool:
    """Tell whether most of the time is in boxes narrower than a pixel of a wide screen, and so not
    seen; however many small ones, such as messages, there are between large ones.
    """
    widths_s = [box.end_s - box.start_s for box in boxes]
    thin_s = sum(width_s for width_s in widths_s if width_s < step_s / _MOST_PARTS)
    return thin_s > sum(widths_s) / 2


def _merged(boxes: Sequence[Box], part_s: float) -> Iterator[Box]:
    """Yield a box for each part of the step in which a rank was not idle throughout."""
    parts: dict[tuple[int, int], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    looks = {box.look.name: box.look for box in boxes}
    counts: dict[tuple[int, int], int] = defaultdict(int)
    for box in boxes:
        first, end = int(box.start_s / part_s), ceil(box.end_s / part_s)
        counts[box.rank, first] += 1
        for n in range(first, max(end, first + 1)):
            within_s = min(box.end_s, (n + 1) * part_s) - max(box.start_s, n * part_s)
            parts[box.rank, n][box.look.name] += within_s
    for (rank, n), times_s in parts.items():
        name = max(times_s, key=lambda name: times_s[name])
        share = min(1.0, sum(times_s.values()) / part_s)
        if share >= _LEAST_SHARE:
            when_s = n * part_s, (n + 1) * part_s
            yield Box(rank, looks[name], *when_s, num_spans=counts[rank, n], share=share)


_HEAD_PX, _FOOT_PX, _GAP_PX = 58, 52, 40
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
    drawn = [(title, timeline, lanes_of(timeline)) for title, timeline in timelines.items()]
    step_s = max((float(t.step_s) for _, t, _ in drawn), default=0.0)
    unit = unit_for(step_s)
    lane_px = _lane_px(max((len(lanes.ranks) for _, _, lanes in drawn), default=1))
    heights = [len(lanes.ranks) * lane_px for _, _, lanes in drawn]
    inner_px = sum(heights) + _GAP_PX * (len(drawn) - 1)
    layout = layout_of(inner_px + _HEAD_PX + _FOOT_PX)
    layout["margin"] = {"l": 74, "r": 16, "t": _HEAD_PX, "b": _FOOT_PX, "pad": 4}
    layout["legend"] |= {"y": 1 + 26 / inner_px}
    layout["uniformtext"] = {"mode": "hide", "minsize": 8}
    layout["xaxis"] = {
        "range": [0, step_s * unit.per_s],
        "title": {"text": f"time ({unit.sign})", "standoff": 12},
        "anchor": f"y{len(drawn)}",
        "zeroline": False,
    }
    layout["shapes"], layout["annotations"] = [], []
    data: list[Trace] = []
    top_px = float(inner_px)
    shown: set[str] = set()
    for n, (title, timeline, lanes) in enumerate(drawn, start=1):
        height = heights[n - 1]
        axis = f"y{n}"
        layout[f"yaxis{n}"] = {
            "domain": [max(0.0, (top_px - height) / inner_px), top_px / inner_px],
            "range": [len(lanes.ranks) - 0.5, -0.5],
            "tickvals": list(range(len(lanes.ranks))),
            "ticktext": [f"rank {rank}" for rank in lanes.ranks],
            "fixedrange": True,
            "automargin": True,
            "showgrid": False,
            "zeroline": False,
        }
        layout["annotations"].append(
            caption(
                _headline(title, timeline.step_s + optimizer_s, bubbles[title]), top_px / inner_px
            )
        )
        layout["shapes"] += _grounds(len(lanes.ranks), timeline.step_s * unit.per_s, axis)
        data += _traces(lanes, unit, axis, shown)
        top_px -= height + _GAP_PX
    data.sort(key=lambda trace: _ORDER[trace["name"]])
    notes = [f"{title}: {lanes.left_out}." for title, _, lanes in drawn if lanes.left_out]
    return Figure(tuple(data), layout, " ".join(notes).capitalize())


def _lane_px(num_lanes: int) -> int:
    return 34 if num_lanes <= 8 else 24 if num_lanes <= 24 else 15


def _headline(title: str, step_s: float, bubble: float) -> str:
    return f"<b>{title}</b>   step {time_text(step_s)}, bubble {percent_text(bubble)}"


def _grounds(num_lanes: int, width: float, axis: str) -> Iterator[dict[str, Any]]:
    """Yield the ground behind each lane: idle time."""
    for lane in range(num_lanes):
        yield {
            "name": "ground",
            "type": "rect",
            "layer": "below",
            "xref": "x",
            "yref": axis,
            "x0": 0,
            "x1": rounded(width),
            "y0": lane - _LANE_HEIGHT / 2,
            "y1": lane + _LANE_HEIGHT / 2,
            "line": {"width": 0},
        }


def _traces(lanes: Lanes, unit: Unit, axis: str, shown: set[str]) -> Iterator[Trace]:
    """Yield the boxes of each kind; a kind that is in `shown` has its place in the legend."""
    lane_of = {rank: n for n, rank in enumerate(lanes.ranks)}
    kinds: dict[str, list[Box]] = defaultdict(list)
    looks: dict[str, Look] = {}
    for box in lanes.boxes:
        kinds[box.look.name].append(box)
        looks[box.look.name] = box.look
    is_numbered = len(lanes.boxes) <= _MOST_NUMBERED
    is_merged = any(box.stage < 0 for box in lanes.boxes)
    letters = {look.name for look in DRAWN.values()}
    many = len({box.stage for box in lanes.boxes}) > len(lanes.ranks)
    for name, boxes in kinds.items():
        look = looks[name]
        trace: Trace = {
            "type": "bar",
            "orientation": "h",
            "name": name,
            "legendgroup": name,
            "showlegend": name not in shown,
            "yaxis": axis,
            "y": [lane_of[box.rank] for box in boxes],
            "base": [rounded(box.start_s * unit.per_s) for box in boxes],
            "x": [rounded((box.end_s - box.start_s) * unit.per_s) for box in boxes],
            "width": _LANE_HEIGHT,
            "marker": {
                "color": look.fill,
                "opacity": [rounded(box.share) for box in boxes] if is_merged else 1,
                "line": {"width": 0.7 if is_numbered else 0},
            },
            "customdata": [_hover(box, unit) for box in boxes],
            "hovertemplate": f"<b>{name}</b>%{{customdata}}<extra></extra>",
        }
        if is_numbered and name in letters:
            trace["text"] = [
                f"{box.stage}:{box.microbatch}" if many else f"{box.microbatch}" for box in boxes
            ]
            trace["textposition"] = "inside"
            trace["insidetextanchor"] = "middle"
            trace["textangle"] = 0
            trace["insidetextfont"] = {"color": look.ink or "#222222", "size": 11}
        shown.add(name)
        yield trace


def _hover(box: Box, unit: Unit) -> str:
    """Say what a box is: short, as there are thousands."""
    start, duration = box.start_s * unit.per_s, (box.end_s - box.start_s) * unit.per_s
    when = f"{number_text(duration)} {unit.sign} from {number_text(start)}"
    if box.stage < 0:
        many = f"{box.num_spans} spans begin here, " if box.num_spans else ""
        return f" and others<br>rank {box.rank}, {many}{box.share:.0%} busy<br>{when}"
    what = f", stage {box.stage}"
    if box.microbatch >= 0:
        what += f", micro-batch {box.microbatch}"
    size = f"<br>{bytes_text(box.num_bytes)}" if box.num_bytes else ""
    return f"{what}<br>rank {box.rank}, {when}{size}"
