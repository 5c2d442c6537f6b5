"""The charts of a page: times and memory of the ranks, and the curves of a run."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import Any

from penstock.trace.breakdown import RankTimes, kinds_of
from penstock.trace.looks import MEMORY, PARTS
from penstock.trace.timeline import MemoryKind, MemorySample, Timeline
from penstock.trace.units import bytes_text, number_text, percent_text, unit_for

from .page import Figure

Trace = dict[str, Any]
Layout = dict[str, Any]
COLOURS = (
    *("#3f74a8", "#e08a1e", "#5f9140", "#8673b0", "#b0594f"),
    *("#86c2bf", "#d98c9f", "#b3d0e8", "#f0bd6e", "#9cc069"),
)
"""The colours of kinds without an entry in looks.py, in order."""


def rounded(value: float) -> float:
    """Round to six significant digits: a chart cannot show more."""
    return float(f"{float(value):.6g}")


def spread(number: int, most: int) -> tuple[int, ...]:
    """Choose at most `most` of so many numbers, evenly, with the first and the last."""
    if number <= most:
        return tuple(range(number))
    return tuple(round(n * (number - 1) / (most - 1)) for n in range(most))


def layout_of(
    height_px: float, *, left: int = 74, top: int = 34, bottom: int = 50, **more: Any
) -> Layout:
    """Return the layout of a chart of so many pixels, with the entries that all charts share."""
    place = {"x": 0, "xanchor": "left", "y": 1, "yanchor": "bottom"}
    return {
        "height": height_px,
        "margin": {"l": left, "r": 16, "t": top, "b": bottom, "pad": 4},
        "legend": {"orientation": "h", "traceorder": "normal", **place},
        "hoverlabel": {"align": "left", "namelength": -1},
        "bargap": 0,
        "barmode": "overlay",
        "hovermode": "closest",
        **more,
    }


def axis_of(title: str, standoff: int = 12, **more: Any) -> Layout:
    return {"title": {"text": title, "standoff": standoff}, **more}


def rows_of(names: Sequence[str]) -> Layout:
    """Return a vertical axis of rows with names, the first on top."""
    return {
        "range": [len(names) - 0.5, -0.5],
        "tickvals": list(range(len(names))),
        "ticktext": list(names),
        "fixedrange": True,
        "automargin": True,
        "showgrid": False,
    }


def stacked(parts: Sequence[tuple[str, int]], gap_px: int, step_s: float, **more: Any) -> Layout:
    """Return the layout of charts one above the other, on one axis of time: yaxis1, yaxis2, ...

    The script of the page zooms all charts of the meta "step" together.

    `parts` are the caption and the height in pixels of each.
    """
    # plotly measures in shares of the inner height, from the bottom up
    unit = unit_for(step_s)
    inner_px = sum(px for _, px in parts) + gap_px * (len(parts) - 1)
    layout = layout_of(inner_px + 110, top=58, bottom=52, shapes=[], annotations=[], **more)
    layout["legend"]["y"] = 1 + 26 / inner_px
    layout["meta"] = "step"
    layout["xaxis"] = axis_of(f"time ({unit.sign})", anchor=f"y{len(parts)}")
    layout["xaxis"]["range"] = [0, rounded(step_s * unit.per_s)]
    place = {"x": 0, "xref": "paper", "yref": "paper", "xanchor": "left", "yanchor": "bottom"}
    top_px = inner_px
    for n, (caption, px) in enumerate(parts, start=1):
        top, low = top_px / inner_px, max(0.0, (top_px - px) / inner_px)
        layout[f"yaxis{n}"] = {"domain": [low, top], "fixedrange": True}
        layout["annotations"].append({"text": caption, "y": top, "showarrow": False, **place})
        top_px -= px + gap_px
    return layout


def once_in_legend(data: Sequence[Trace]) -> tuple[Trace, ...]:
    """Let only the first trace of each name stand in the legend."""
    first = {trace["name"]: n for n, trace in reversed(list(enumerate(data)))}
    return tuple({**t, "showlegend": first[t["name"]] == n} for n, t in enumerate(data))


MOST_BARS = 64
"""Bars of a chart of times."""
_BAR_PX = 26
"""Height of a bar in pixels."""


def time_chart(times: Mapping[str, Sequence[RankTimes]]) -> Figure:
    """Draw a stacked bar for each rank; the predicted and the measured one side by side."""
    # 1. Choose the ranks that are drawn, with a bar for each timeline.
    num_ranks = max(map(len, times.values()))
    ranks = spread(num_ranks, MOST_BARS // len(times))
    bars = [
        (f"rank {n} {title}" if len(times) > 1 else f"rank {n}", of_ranks[n])
        for n in ranks
        for title, of_ranks in times.items()
        if n < len(of_ranks)
    ]
    unit = unit_for(max(float(bar.total_s) for _, bar in bars))
    # 2. Draw a part of all bars for each kind of time.
    data: list[Trace] = []
    for kind in kinds_of([bar for _, bar in bars]):
        values = [float(getattr(bar, kind) * unit.per_s) for _, bar in bars]
        shares = (percent_text(getattr(bar, kind) / (bar.total_s or 1)) for _, bar in bars)
        data.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": PARTS[kind].name,
                "y": list(range(len(bars))),
                "x": [rounded(value) for value in values],
                "width": 0.76,
                "marker": {"color": PARTS[kind].fill, "line": {"width": 0.5}},
                "customdata": [
                    f"{name}<br>{number_text(value)} {unit.sign}, {share} of the step"
                    for (name, _), value, share in zip(bars, values, shares, strict=True)
                ],
                "hovertemplate": f"<b>{PARTS[kind].name}</b>, %{{customdata}}<extra></extra>",
            }
        )
    # 3. Name the bars, and say how many ranks are left out.
    left = 74 if len(times) == 1 else 128
    layout = layout_of(len(bars) * _BAR_PX + 94, left=left, top=40, barmode="stack")
    layout |= {"xaxis": axis_of(f"time ({unit.sign})"), "yaxis": rows_of([n for n, _ in bars])}
    note = f"{len(ranks)} of {num_ranks:,} ranks are drawn, evenly chosen."
    return Figure("times", tuple(data), layout, note if len(ranks) < num_ranks else "")


MOST_STRIPS = 16
"""Strips of a chart of memory, one for each rank."""
_MOST_POINTS = 40_000
"""Points of all strips together."""
_STRIP_PX = 92
"""Height of a strip in pixels."""
_GAP_PX = 30
"""Pixels between two strips."""
_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("bytes", 1))
"""Units of memory and their bytes, the largest first."""


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes on a rank: `num_bytes[kind][n]` from `times_s[n]` on, until the next time."""

    times_s: tuple[float, ...]
    num_bytes: Mapping[MemoryKind, tuple[int, ...]]

    @property
    def totals(self) -> list[int]:
        """Bytes of all kinds together, at each time."""
        return list(map(sum, zip(*self.num_bytes.values(), strict=True)))


def held_bytes(timeline: Timeline) -> dict[int, Held]:
    """Return the memory of each rank by kind, summed over its stages."""
    rank_of = {span.instruction.stage: span.rank for span in timeline.spans}
    zero_s = timeline.start_s
    of_ranks: dict[int, list[MemorySample]] = defaultdict(list)
    for sample in sorted(timeline.memory, key=lambda sample: sample.time_s):
        of_ranks[rank_of.get(sample.stage, sample.stage)].append(sample)
    held: dict[int, Held] = {}
    for rank, samples in sorted(of_ranks.items()):
        kinds = {sample.kind for sample in samples}
        now = {kind: 0 for kind in MEMORY if kind in kinds}
        last: dict[tuple[int, MemoryKind], int] = defaultdict(int)
        rows: dict[float, tuple[int, ...]] = {}
        for sample in samples:
            key = sample.stage, sample.kind
            now[sample.kind] += sample.kept_bytes - last[key]
            last[key] = sample.kept_bytes
            rows[float(sample.time_s - zero_s)] = tuple(now.values())
        by_kind = zip(now, zip(*rows.values(), strict=True), strict=True)
        held[rank] = Held(tuple(rows), dict(by_kind))
    return held


_FAR = 4
"""A limit of more than so many peaks lies off the scale; the strip's head still names it."""


def memory_chart(
    timeline: Timeline,
    limits_bytes: Sequence[int],
    name: str = "memory",
    *,
    axis_s: float | None = None,
) -> Figure:
    """Draw a strip for each rank, all to one scale, on an axis of `axis_s` (None: the step)."""
    # 1. choose the ranks with the highest peaks, and one unit for all
    held = held_bytes(timeline)
    peaks = {rank: max(of_rank.totals) for rank, of_rank in held.items()}
    ranks = sorted(sorted(peaks, key=lambda rank: -peaks[rank])[:MOST_STRIPS])
    limits = {rank: limits_bytes[rank] for rank in ranks if rank < len(limits_bytes)}
    highest = max(peaks.values())
    near = {rank: limit for rank, limit in limits.items() if limit <= _FAR * highest}
    top = max([highest, *near.values()]) or 1
    axis_s = float(timeline.step_s) if axis_s is None else axis_s
    sign, size = next((unit for unit in _UNITS if top >= unit[1]), _UNITS[-1])

    # 2. draw a strip for each, with a dashed line at its limit
    limited = {
        rank: f", {_share_text(peaks[rank] / limit)} of {bytes_text(limit)}"
        for rank, limit in limits.items()
        if limit
    }
    heads = (
        f"<b>rank {rank}</b>   peak {bytes_text(peaks[rank])}{limited.get(rank, '')}"
        for rank in ranks
    )
    parts = [(head, _STRIP_PX) for head in heads]
    layout = stacked(parts, _GAP_PX, axis_s, hovermode="x unified")
    most = _MOST_POINTS // sum(len(held[rank].num_bytes) for rank in ranks)
    data: list[Trace] = []
    for n, rank in enumerate(ranks, start=1):
        layout[f"yaxis{n}"] |= axis_of(sign, 6, nticks=4, range=[0, rounded(1.08 * top / size)])
        if rank in near:
            height, place = rounded(limits[rank] / size), {"xref": "paper", "yref": f"y{n}"}
            line = {"type": "line", "line": {"width": 1.5, "dash": "dash"}, **place}
            ends = {"x0": 0, "x1": 1, "y0": height, "y1": height}
            layout["shapes"].append({"name": "limit", **line, **ends})
        data += _areas(held[rank], float(timeline.step_s), axis_s, most, size, f"y{n}")
    layout["showlegend"] = len({trace["name"] for trace in data}) > 1

    # 3. say what is left out
    notes = []
    if len(near) < len(limits):
        notes.append("The scale ends at the peaks: the memory of the devices lies far above it.")
    if len(ranks) < len(peaks):
        notes.append(f"The {len(ranks)} of {len(peaks):,} ranks that keep most are drawn.")
    if any(len(held[rank].times_s) > most for rank in ranks):
        notes.append(f"Of each line at most {most:,} points are drawn, the highest among them.")
    return Figure(name, once_in_legend(data), layout, " ".join(notes))


def _share_text(share: float) -> str:
    """Write a share as per cent, a small one with one digit that is not 0."""
    return percent_text(share) if share >= _SMALL or not share else f"{100 * share:.1g}%"


_SMALL = 1e-3


def _areas(
    held: Held, step_s: float, axis_s: float, most: int, size: int, axis: str
) -> Iterator[Trace]:
    """Yield the memory of a rank by kind, stacked, in units of `size` bytes."""
    totals, unit = held.totals, unit_for(axis_s)
    points = list(range(len(totals)))
    if len(totals) > most:  # of each of `most` parts the point with the most bytes
        bounds = [len(totals) * n // most for n in range(most + 1)]
        points = [max(range(a, b), key=totals.__getitem__) for a, b in pairwise(bounds)]
    times_s = [*(held.times_s[n] for n in points), float(step_s)]
    for kind, num_bytes in held.num_bytes.items():
        look = MEMORY[kind]
        yield {
            "type": "scatter",
            "mode": "lines",
            "name": look.name,
            "yaxis": axis,
            "stackgroup": axis,
            "line": {"shape": "hv", "width": 1, "color": look.fill},
            "fillcolor": look.fill,
            "x": [rounded(time_s * unit.per_s) for time_s in times_s],
            "y": [*(rounded(num_bytes[n] / size) for n in points), rounded(num_bytes[-1] / size)],
            "hovertemplate": f"{look.name}: %{{y:.4g}}<extra></extra>",
        }


MOST_POINTS = 3_000
"""Points of a curve."""
_FEW_POINTS = 60
"""Points up to which a curve has markers."""
_NO_CURVE = ("kind", "step", "epoch")
"""Metrics that are no curve."""
_LOSSES = {"loss": "of a step", "train_loss": "mean of an epoch"}
"""The labels of the two training losses."""

Metrics = Sequence[Mapping[str, Any]]


def curves(metrics: Metrics) -> Iterator[Figure]:
    """Yield a chart for each number, over steps; losses together, first."""
    names = _numbers_of(metrics)
    losses = [name for name in names if name in _LOSSES or name.endswith("_loss")]
    if losses:
        shown = {_LOSSES.get(name) or _title(name): name for name in losses}
        yield _curve("loss", {label: (metrics, name) for label, name in shown.items()})
    for name in names:
        if name not in losses:
            yield _curve(_title(name), {_title(name): (metrics, name)})


def curves_of_runs(runs: Mapping[str, Metrics]) -> Iterator[Figure]:
    """Yield a chart for each number, with a curve for each run that has it."""
    numbers = {run: _numbers_of(metrics) for run, metrics in runs.items()}
    for name in dict.fromkeys(name for names in numbers.values() for name in names):
        having = {run: (runs[run], name) for run, names in numbers.items() if name in names}
        title = f"loss, {_LOSSES[name]}" if name in _LOSSES else _title(name)
        yield _curve(title, having)


def _numbers_of(metrics: Metrics) -> list[str]:
    names = dict.fromkeys(
        name
        for line in metrics
        for name, value in line.items()
        if name not in _NO_CURVE and _is_number(value)
    )
    return list(names)


def _curve(title: str, named: Mapping[str, tuple[Metrics, str]]) -> Figure:
    """Draw curves by label, each a number of some metrics."""
    data: list[Trace] = []
    notes: dict[str, None] = {}
    for n, (label, (metrics, name)) in enumerate(named.items()):
        points = [(line["step"], line[name]) for line in metrics if _is_number(line.get(name))]
        # Of many points every n-th is drawn, and the last.
        stride = -(-len(points) // MOST_POINTS)
        if stride > 1:
            notes[f"Of {len(points):,} points, one in {stride} is drawn."] = None
        points = [*points[:-1:stride], points[-1]]
        shown = escape(label)
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers" if len(points) <= _FEW_POINTS else "lines",
                "marker": {"size": 4},
                "name": shown,
                "line": {"color": COLOURS[n % len(COLOURS)], "width": 1.8},
                "x": [step for step, _ in points],
                "y": [rounded(value) for _, value in points],
                "hovertemplate": f"step %{{x:,}}<br><b>%{{y:.5g}}</b> {shown}<extra></extra>",
            }
        )
    # One curve needs no legend: its name is the title.
    several = len(data) > 1
    layout = layout_of(270, left=58, top=30 if several else 10, showlegend=several)
    layout["meta"] = "curve"
    layout["xaxis"] = axis_of("step", 8, rangemode="tozero")
    layout["yaxis"] = {"nticks": 6, "exponentformat": "power"}
    first = next(iter(named.values()))[1]
    return Figure(f"curve {first}", tuple(data), layout, " ".join(notes), title)


def _title(name: str) -> str:
    return name.replace("_per_s", "/s").replace("_", " ")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
