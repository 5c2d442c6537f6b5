"""The charts over time: memory on each rank, by what it is kept for, with the limit; and the
curves of a run, one for each number that its metrics have.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import Any

from penstock.trace.looks import MEMORY, Look
from penstock.trace.timeline import MemoryKind, MemorySample, Timeline
from penstock.trace.units import bytes_text, unit_for

from .markup import Figure, Trace, caption, layout_of, rounded

MOST_STRIPS = 16
_MOST_POINTS = 40_000
"""Of all strips together."""
_STRIP_PX, _GAP_PX, _FOOT_PX, _HEAD_PX = 92, 30, 52, 58
_UNITS = (("bytes", 1), ("KiB", 2**10), ("MiB", 2**20), ("GiB", 2**30))


@dataclass(frozen=True, slots=True)
class Series:
    """Bytes on a rank for one purpose: `num_bytes[n]` from `times_s[n]` on, until the next."""

    rank: int
    look: Look
    times_s: tuple[float, ...]
    num_bytes: tuple[int, ...]


def memory_series(timeline: Timeline) -> Iterator[Series]:
    """Yield what each rank holds of each kind, all its stages together."""
    rank_of = {span.instruction.stage: span.rank for span in timeline.spans}
    samples: dict[tuple[int, MemoryKind], list[MemorySample]] = defaultdict(list)
    for sample in timeline.memory:
        samples[rank_of.get(sample.stage, sample.stage), sample.kind].append(sample)
    order = list(MEMORY)
    for rank, kind in sorted(samples, key=lambda key: (key[0], order.index(key[1]))):
        held: dict[int, int] = {}
        totals: dict[float, int] = {}
        for sample in sorted(samples[rank, kind], key=lambda sample: sample.time_s):
            held[sample.stage] = sample.kept_bytes
            totals[float(sample.time_s - timeline.start_s)] = sum(held.values())
        yield Series(rank, MEMORY[kind], tuple(totals), tuple(totals.values()))


def memory_chart(timeline: Timeline, limits_bytes: Sequence[int]) -> Figure:
    """Draw a strip for each rank, all to one scale."""
    of_ranks: dict[int, list[Series]] = defaultdict(list)
    for series in memory_series(timeline):
        of_ranks[series.rank].append(series)
    stacks = {rank: _stacked(series) for rank, series in of_ranks.items()}
    peaks = {rank: max(map(sum, zip(*rows, strict=True))) for rank, (_, rows) in stacks.items()}
    ranks = sorted(sorted(peaks, key=lambda rank: -peaks[rank])[:MOST_STRIPS])
    limits = {rank: limits_bytes[rank] for rank in ranks if rank < len(limits_bytes)}
    top = max([*peaks.values(), *limits.values()]) or 1
    sign, size = next((u for u in reversed(_UNITS) if top >= u[1]), _UNITS[0])
    unit = unit_for(timeline.step_s)
    inner_px = len(ranks) * _STRIP_PX + (len(ranks) - 1) * _GAP_PX
    layout = layout_of(inner_px + _HEAD_PX + _FOOT_PX, hovermode="x unified")
    layout["margin"] = {**layout["margin"], "t": _HEAD_PX, "b": _FOOT_PX}
    layout["legend"] |= {"y": 1 + 26 / inner_px}
    layout["xaxis"] = {
        "range": [0, rounded(timeline.step_s * unit.per_s)],
        "title": {"text": f"time ({unit.sign})", "standoff": 12},
        "anchor": f"y{len(ranks)}",
        "zeroline": False,
    }
    layout["shapes"], layout["annotations"] = [], []
    names: set[str] = set()
    data: list[Trace] = []
    most, is_thinned = _MOST_POINTS // sum(len(of_ranks[rank]) for rank in ranks), False
    for n, rank in enumerate(ranks, start=1):
        top_share = 1 - (n - 1) * (_STRIP_PX + _GAP_PX) / inner_px
        layout[f"yaxis{n}"] = {
            "domain": [max(0.0, top_share - _STRIP_PX / inner_px), top_share],
            "range": [0, rounded(1.08 * top / size)],
            "title": {"text": sign, "standoff": 6},
            "nticks": 4,
            "fixedrange": True,
            "zeroline": False,
        }
        head = f"<b>rank {rank}</b>   peak {bytes_text(peaks[rank])}"
        if rank in limits:
            head += f", limit {bytes_text(limits[rank])}"
            layout["shapes"].append(_limit(limits[rank] / size, f"y{n}"))
        layout["annotations"].append(caption(head, top_share))
        times_s, rows = stacks[rank]
        kept = _thinned(rows, most)
        is_thinned = is_thinned or len(kept) < len(times_s)
        for series, row in zip(of_ranks[rank], rows, strict=True):
            x = [*(rounded(times_s[k] * unit.per_s) for k in kept), timeline.step_s * unit.per_s]
            y = [*(row[k] for k in kept), row[-1]]
            is_new = series.look.name not in names
            names.add(series.look.name)
            data.append(
                {**_area(series, (list(map(rounded, x)), y), size, n), "showlegend": is_new}
            )
    layout["showlegend"] = len(names) > 1
    said = []
    if len(ranks) < len(peaks):
        said.append(f"The {len(ranks)} of {len(peaks):,} ranks that keep most are drawn.")
    if is_thinned:
        said.append(f"Of each line at most {most:,} points are drawn, the highest among them.")
    return Figure(tuple(data), layout, " ".join(said))


def _stacked(series: Sequence[Series]) -> tuple[list[float], list[list[int]]]:
    """Return all times of a rank, and the bytes of each of its series at these times."""
    times_s = sorted({time_s for each in series for time_s in each.times_s})
    rows = []
    for each in series:
        places = (bisect_right(each.times_s, time_s) - 1 for time_s in times_s)
        rows.append([each.num_bytes[place] if place >= 0 else 0 for place in places])
    return times_s, rows


def _thinned(rows: Sequence[Sequence[int]], most: int) -> list[int]:
    """Choose points: of each of so many parts the one with the most bytes."""
    totals = list(map(sum, zip(*rows, strict=True)))
    most = max(1, most)
    if len(totals) <= most:
        return list(range(len(totals)))
    bounds = [len(totals) * n // most for n in range(most + 1)]
    return [max(range(a, b), key=totals.__getitem__) for a, b in pairwise(bounds) if b > a]


def _area(series: Series, points: tuple[list[float], list[int]], size: int, n: int) -> Trace:
    x, y = points
    return {
        "type": "scatter",
        "mode": "lines",
        "name": series.look.name,
        "yaxis": f"y{n}",
        "stackgroup": f"rank {series.rank}",
        "line": {"shape": "hv", "width": 1, "color": series.look.fill},
        "fillcolor": series.look.fill,
        "x": x,
        "y": [rounded(each / size) for each in y],
        "hovertemplate": f"{series.look.name}: %{{y:.4g}}<extra></extra>",
    }


def _limit(height: float, axis: str) -> dict[str, Any]:
    return {
        "name": "limit",
        "type": "line",
        "xref": "paper",
        "yref": axis,
        "x0": 0,
        "x1": 1,
        "y0": rounded(height),
        "y1": rounded(height),
        "line": {"width": 1.5, "dash": "dash"},
    }


MOST_POINTS = 3_000
_NO_CURVE = ("kind", "step", "epoch")
_LOSSES = {"loss": "of a step", "train_loss": "mean of an epoch"}
_COLOURS = ("#3f74a8", "#e08a1e", "#5f9140", "#8673b0", "#b0594f")

Metrics = Sequence[Mapping[str, Any]]


def curves(metrics: Metrics) -> Iterator[tuple[str, Figure]]:
    """Yield a title and a chart for each number, over steps; losses together, first."""
    names = dict.fromkeys(
        name
        for line in metrics
        for name, value in line.items()
        if name not in _NO_CURVE and _is_number(value)
    )
    losses = [name for name in names if name in _LOSSES or name.endswith("_loss")]
    if losses:
        yield "loss", _chart(metrics, losses)
    for name in names:
        if name not in losses:
            yield _title(name), _chart(metrics, [name])


def _chart(metrics: Metrics, names: Sequence[str]) -> Figure:
    data: list[Trace] = []
    notes = []
    for n, name in enumerate(names):
        points = [(line["step"], line[name]) for line in metrics if _is_number(line.get(name))]
        every = -(-len(points) // MOST_POINTS)
        if every > 1:
            notes.append(f"Of {len(points):,} points, one in {every} is drawn.")
        points = [*points[:-1:every], points[-1]]
        title = escape(_LOSSES.get(name) or _title(name))
        few = len(points) <= 60
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers" if few else "lines",
                "marker": {"size": 4},
                "name": title,
                "line": {"color": _COLOURS[n % len(_COLOURS)], "width": 1.8},
                "x": [step for step, _ in points],
                "y": [rounded(value) for _, value in points],
                "hovertemplate": f"step %{{x:,}}<br><b>%{{y:.5g}}</b> {title}<extra></extra>",
            }
        )
    layout = layout_of(270, showlegend=len(data) > 1)
    layout["margin"] = {**layout["margin"], "l": 58, "t": 30 if len(data) > 1 else 10}
    layout["xaxis"] = {
        "title": {"text": "step", "standoff": 8},
        "zeroline": False,
        "rangemode": "tozero",
    }
    layout["yaxis"] = {"zeroline": False, "nticks": 6, "exponentformat": "power"}
    return Figure(tuple(data), layout, " ".join(notes))


def _title(name: str) -> str:
    return name.replace("_per_s", "/s").replace("_", " ")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
