"""Put a page together: head, charts, tables, texts, and the library that draws the charts."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template

from penstock.errors import ConfigError, RunFolderError
from penstock.trace.breakdown import Breakdown
from penstock.trace.rank_times import rank_times
from penstock.trace.timeline import MemoryKind, Timeline
from penstock.trace.units import percent_text, time_text

from .lane_chart import lane_chart
from .markup import (
    Figure,
    chart_html,
    data_html,
    fact_html,
    note_html,
    parts_html,
    section_html,
    table_html,
)
from .memory_chart import curves, memory_chart
from .page import Fact, Page
from .time_chart import Times, difference_table, differences, time_chart, time_table

SIGNATURE = '<meta name="generator" content="penstock">'
"""Stands near the top of every page, so that a page of ours can be told from other files."""

_IMBALANCE = (
    "Load imbalance is idle time beyond that of equal stages; bubble is the rest of the idle time."
)


def check_renderable() -> None:
    """See that the library that draws the charts is there.

    Raises:
        ConfigError: plotly is not installed.
    """
    try:
        import plotly.offline  # noqa: F401 - to see whether it is there
    except ImportError:
        raise ConfigError(
            "the page of a report needs plotly, which is not installed: "
            "pip install 'penstock[report]'"
        ) from None


def render_page(page: Page) -> str:
    """Write `page` as one HTML text that needs no other file and no network.

    Raises:
        ConfigError: plotly is not installed.
    """
    check_renderable()
    from plotly.offline import get_plotlyjs

    figures: dict[str, Figure] = {}
    timelines = _timelines(page)
    breakdowns = {title: timeline.breakdown() for title, timeline in timelines.items()}
    sections = list(_sections(page, breakdowns, figures))
    links = "".join(f'<a href="#{anchor}">{escape(title)}</a>' for anchor, title, _ in sections)
    facts = [*page.facts, *_step_facts(page, breakdowns)]
    return Template(_asset("page.html")).substitute(
        signature=SIGNATURE,
        title=escape(page.title),
        subtitle=escape(page.subtitle),
        style=_asset("page.css"),
        facts="\n".join(map(fact_html, facts)),
        links=links,
        notes="\n".join(map(note_html, page.notes)),
        sections="\n".join(section_html(*section) for section in sections),
        figures=data_html(figures),
        library=get_plotlyjs(),
        script=_asset("page.js"),
    )


@cache
def _asset(name: str) -> str:
    return (files(__package__) / name).read_text(encoding="utf-8")


def _timelines(page: Page) -> dict[str, Timeline]:
    """Return the steps that took any time, by what they are."""
    both = {"predicted": page.predicted, "measured": page.measured}
    return {title: t for title, t in both.items() if t is not None and t.step_s}


def _with_rest(page: Page, times: Times) -> Times:
    """Add what the page's step spent outside of its timeline."""
    rest = {"optimizer_s": page.optimizer_s, "set_up_s": page.set_up_s}
    own = "predicted" if page.measured is None else "measured"
    return {
        title: tuple(rank.with_rest(**rest) for rank in ranks) if title == own else ranks
        for title, ranks in times.items()
    }


def _step_facts(page: Page, breakdowns: Mapping[str, Breakdown]) -> Iterator[Fact]:
    """Yield the figures of the measured step, or of the one that was predicted."""
    for title, name in (("measured", "timed step"), ("predicted", "predicted step")):
        if title in breakdowns:
            parts = breakdowns[title]
            predicted = breakdowns.get("predicted") if title == "measured" else None
            step_s = parts.step_s if title == "measured" else parts.step_s + page.optimizer_s
            yield Fact(name, time_text(step_s), _step_remark(page, parts, predicted))
            ideal = percent_text(1 - parts.ideal_utilisation)
            yield Fact("bubble", percent_text(parts.bubble), f"{ideal} without messages")
            return


def _step_remark(page: Page, parts: Breakdown, predicted: Breakdown | None) -> str:
    """Say what was predicted of the measured step; else what lies outside of its timeline."""
    if predicted is not None:
        missed = float(parts.step_s / predicted.step_s) - 1
        return f"{time_text(predicted.step_s)} predicted, {missed:+.1%}"
    if page.measured is None:
        return f"{time_text(page.optimizer_s)} of it the optimizer" if page.optimizer_s else ""
    more_s = page.optimizer_s + page.set_up_s
    return f"and {time_text(more_s)} for optimizer and set-up" if more_s else ""


def _sections(
    page: Page, breakdowns: Mapping[str, Breakdown], figures: dict[str, Figure]
) -> Iterator[tuple[str, str, str]]:
    """Yield anchor, title and HTML of each section; puts charts into `figures`."""
    timelines = _timelines(page)
    if timelines:
        times = {title: rank_times(timeline) for title, timeline in timelines.items()}
        bubbles = {title: parts.bubble for title, parts in breakdowns.items()}
        after_s = page.optimizer_s if page.measured is None else 0.0
        figures["timeline"] = lane_chart(timelines, bubbles, optimizer_s=after_s)
        yield "timeline", "Timeline", _timeline(timelines, times, figures["timeline"].note)
        yield "time", "Where the time goes", _time(_with_rest(page, times), figures)
    memory = _memory(page, figures)
    if memory:
        yield "memory", "Memory", memory
    drawn = []
    for n, (title, figure) in enumerate(curves(page.metrics)):
        figures[f"curve-{n}"] = figure
        drawn.append(chart_html(f"curve-{n}", title, figure.note))
    if drawn:
        yield "curves", "Curves", f'<div class="grid">{"".join(drawn)}</div>'
    for section in page.sections:
        anchor = "".join(c if c.isalnum() else "-" for c in section.title.lower())
        yield f"section-{escape(anchor)}", section.title, parts_html(section)


def _timeline(timelines: Mapping[str, Timeline], times: Times, note: str) -> str:
    body = (
        '<p class="hint">Drag to zoom, shift and drag to move, double-click for the whole step; '
        "a click in the legend hides a kind.</p>" + chart_html("timeline", note=note)
    )
    if len(timelines) < 2:
        return body
    found = differences(timelines["predicted"], timelines["measured"], times)
    return f"{body}<h3>Predicted and measured</h3>{table_html(difference_table(found))}"


def _time(times: Times, figures: dict[str, Figure]) -> str:
    figure = figures["times"] = time_chart(times)
    tables = []
    for title, ranks in times.items():
        tables.append(f"<h3>{title.capitalize()}</h3>" if len(times) > 1 else "")
        tables.append(table_html(time_table(ranks)))
    return chart_html("times", note=figure.note) + "".join(tables) + note_html(_IMBALANCE)


def _memory(page: Page, figures: dict[str, Figure]) -> str:
    """Draw what was predicted of memory, and what was measured, with its limits."""
    charts = []
    for title, timeline in (
        ("predicted", page.predicted),
        ("measured", page.memory or page.measured),
    ):
        if timeline is None or not timeline.memory:
            continue
        kept_only = {sample.kind for sample in timeline.memory} == {MemoryKind.ACTIVATIONS}
        limits = page.kept_limits_bytes if kept_only else page.memory_limits_bytes
        figure = figures[f"memory-{title}"] = memory_chart(timeline, limits)
        words = f"{title}: {'kept for backward passes' if kept_only else 'all memory'}"
        charts.append(chart_html(f"memory-{title}", words.capitalize(), figure.note))
    return "".join(charts)


_HEAD_CHARACTERS = 500
"""Of a page, in which its signature stands."""


def check_replaceable(output: Path) -> None:
    """See that there is no file at `output`, or a page of ours.

    Raises:
        RunFolderError: there is something else.
    """
    if not output.exists():
        return
    with suppress(OSError), output.open(encoding="utf-8", errors="replace") as file:
        if SIGNATURE in file.read(_HEAD_CHARACTERS):
            return
    raise RunFolderError(
        f"{output} exists already and is no report; choose another name, or move it away"
    )
