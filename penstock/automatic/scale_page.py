"""The page of `penstock scale`: speed by number of devices beside the ideal, and the table."""

from typing import Any

from penstock.trace.page import Page, Section, Table
from penstock.trace.page.charts import COLOURS, Trace, axis_of, layout_of, rounded
from penstock.trace.page.page import Figure
from penstock.trace.units import count_text

from .scaling import Scaling

_HEIGHT_PX = 380


def scale_page(scaling: Scaling, num_samples: int | None = None) -> Page:
    """Return the page; device-hours are those of so many samples, or else of 1,000 steps."""
    heads, *rows = scaling.rows(num_samples)
    what = "1,000 steps" if num_samples is None else count_text(num_samples, "sample")
    table = Table(heads, tuple(rows), f"Plans; device-hours of {what}")
    figures = (scale_figure(scaling),) if scaling.figures else ()
    batch = f"batches of {count_text(scaling.batch_size, 'sample')}, predicted"
    sections = (Section("Speed by devices", (*figures, table)),)
    return Page(f"{scaling.model} on {scaling.cluster}", batch, sections=sections)


def scale_figure(scaling: Scaling) -> Figure:
    """Draw samples or tokens a second by devices, both axes as logarithms, with the ideal line."""
    counts, found = [*scaling.figures], [*scaling.figures.values()]
    times = scaling.sample_tokens or 1
    unit = "tokens/s" if scaling.sample_tokens else "samples/s"
    rates = [own.samples_per_s * times for own in found]
    words = {own.num_devices: own.words for own in scaling.counts}
    ideal = [rates[0] * count / counts[0] for count in counts]
    planned: Trace = {
        "type": "scatter",
        "mode": "lines+markers",
        "name": "planned",
        "marker": {"size": 7},
        "line": {"color": COLOURS[0], "width": 2},
        "x": counts,
        "y": [*map(rounded, rates)],
        "customdata": [
            f"{own.efficiency:.0%} of ideal<br>{words[count]}"
            for count, own in zip(counts, found, strict=True)
        ],
        "hovertemplate": f"%{{x:,}} devices<br><b>%{{y:.4g}}</b> {unit}, %{{customdata}}"
        "<extra></extra>",
    }
    line: Trace = {
        "type": "scatter",
        "mode": "lines",
        "name": f"ideal: that of {count_text(counts[0], 'device')} times their number",
        "line": {"color": COLOURS[1], "width": 1.5, "dash": "dash"},
        "x": counts,
        "y": [*map(rounded, ideal)],
        "hoverinfo": "skip",
    }
    layout = layout_of(_HEIGHT_PX)
    ticks: dict[str, Any] = {"tickvals": counts, "ticktext": [f"{count:,}" for count in counts]}
    layout["xaxis"] = axis_of("devices", type="log", **ticks)
    layout["yaxis"] = axis_of(unit, type="log", exponentformat="SI", minorloglabels="none")
    label = f"{unit} at {', '.join(map(str, counts))} devices, with the ideal line"
    return Figure("scale", (planned, line), layout, label=label)
