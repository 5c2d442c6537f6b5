"""The curves of a run: a chart for each number that its metrics have."""

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from .figure import Figure, Trace, layout_of, rounded

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
