"""The chart of lanes: what each rank did when; foretold above measured, on one time axis."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from penstock.trace.looks import DRAWN, LOOKS, WAIT, Look
from penstock.trace.timeline import Timeline
from penstock.trace.units import Unit, bytes_text, number_text, percent_text, time_text, unit_for

from .boxes import Box, Lanes, lanes_of
from .figure import Figure, Trace, caption, layout_of, rounded

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
