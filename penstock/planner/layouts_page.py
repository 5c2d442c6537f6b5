"""The page of given layouts: their figures, and the predicted steps of the fastest."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from html import escape

from penstock.costs.cluster import Cluster
from penstock.trace.page import Fact, Page, Section, Step, Table, Text, with_step
from penstock.trace.page.charts import memory_chart
from penstock.trace.page.lane_chart import lane_chart
from penstock.trace.units import count_text

from .layout_figures import NOTE, LayoutFigures, best_in_words, rows_of

_MOST_DRAWN = 4
"""Layouts whose steps are drawn."""
_NOTE = "A rank of the timeline stands for all devices of a mesh; steps end before the optimizer."
_FACTS = ("MFU", "collectives", "between stages", "memory")


def layout_page(own: LayoutFigures) -> Page:
    """Return the page of one layout that can be."""
    cluster, cells = own.own.task.cluster, own.cells
    limits = (own.limit_bytes,) * len(set(own.own.answer.devices))
    step = Step(
        predicted=own.own.timeline, optimizer_s=own.own.update_s, memory_limits_bytes=limits
    )
    page = with_step(Page(f"{own.name} on {cluster.name}", str(own.layout)), step)
    facts = [Fact(f"{own.unit}/s a device", cells["per device"].split(" ")[0])]
    facts += [Fact(name, cells[name]) for name in _FACTS]
    heads, *rows = (tuple(row) for row in own.own.plan.rows)
    stages = Section("Stages", (Table(heads, tuple(rows)),))
    sections = *page.sections, stages, _cluster(cluster)
    return replace(page, facts=(*page.facts, *facts), sections=sections, notes=(_NOTE, NOTE))


def layouts_page(name: str, cluster: Cluster, figures: Sequence[LayoutFigures]) -> Page:
    """Return the page of the layouts of a model by its name, in the order given."""
    heads, *rows = rows_of(figures)
    told = tuple((own.name, str(own.layout)) for own in figures)
    sections = (
        Section("Layouts", (Text(best_in_words(figures)), Table(heads, tuple(rows)))),
        *_steps(figures),
        Section("Words of the layouts", (Table(("name", "words"), told),)),
        _cluster(cluster),
    )
    title = f"{name} on {cluster.name}"
    return Page(title, count_text(len(figures), "layout"), sections=sections, notes=(NOTE,))


def _steps(figures: Sequence[LayoutFigures]) -> Iterator[Section]:
    """Yield the timelines of the fastest layouts, and their memory where it is known."""
    can = [own for own in figures if own.candidate is not None]
    if not can:
        return
    drawn = {escape(own.name): own.own.timeline for own in can[:_MOST_DRAWN]}
    bubbles = {escape(own.name): own.bubble for own in can}
    left = f" The {len(drawn)} fastest are drawn." if len(drawn) < len(can) else ""
    yield Section("Timelines", (lane_chart(drawn, bubbles), Text(_NOTE + left, "note")))
    charts = [
        replace(
            memory_chart(own.own.timeline, (own.limit_bytes,) * len(own.devices), f"memory-{n}"),
            title=own.name,  # escaped by the page
        )
        for n, own in enumerate(can[:_MOST_DRAWN])
        if own.own.timeline.memory
    ]
    if charts:
        yield Section("Memory", tuple(charts))


def _cluster(cluster: Cluster) -> Section:
    return Section("Cluster", (Text(str(cluster), "code"),))
