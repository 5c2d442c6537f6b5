"""A plan on a page: what was chosen and why, and the table of its stages."""

from pathlib import Path

from penstock.costs.cluster import Cluster
from penstock.errors import PlanError
from penstock.interval import likely
from penstock.trace.page import Page, Section, Table, Text, render_page
from penstock.trace.page.render import check_replaceable
from penstock.trace.units import count_text

from .plan import Plan
from .rank import Candidates
from .reasons import HEADS, choice_rows


def write_plan_page(path: Path, plan: Plan, choices: Candidates, cluster: Cluster) -> None:
    """Write the page of a plan that was chosen.

    Raises:
        RunFolderError: another file is in the way.
        PlanError: the file cannot be written.
        ConfigError: plotly is not installed.
    """
    check_replaceable(path)
    text = render_page(plan_page(plan, choices, cluster))
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise PlanError(f"cannot write the page {path}: {error.strerror}") from None


def plan_page(plan: Plan, choices: Candidates, cluster: Cluster) -> Page:
    """Return the page of a plan that was chosen for a cluster."""
    best = choices.best[0].predicted
    devices = [cluster.resolved(likely).device_of(place) for place in best.places]
    limits = [devices[rank].memory_bytes for rank in plan.placement.peers_in(0)]
    return Page(
        title=f"Plan for {cluster.name}",
        subtitle=plan_subtitle(plan),
        predicted=best.timeline,
        optimizer_s=best.update_s,
        memory_limits_bytes=tuple(limits),
        sections=(
            Section("Candidates", (Table(HEADS, tuple(choice_rows(choices))),)),
            plan_section(plan),
            Section("Cluster", (Text(str(cluster), is_code=True),)),
        ),
    )


def plan_section(plan: Plan) -> Section:
    """Write a plan as a section of a page."""
    heads, *rows = (tuple(row) for row in plan.rows)
    lines = (line for each in plan.reasons for line in each.splitlines())
    return Section("Plan", (*map(Text, lines), Table(heads, tuple(rows))))


def plan_subtitle(plan: Plan) -> str:
    """Say in a line what a plan runs."""
    replicas, stages = plan.placement.num_replicas, count_text(plan.num_stages, "stage")
    return ", ".join(
        (
            f"{count_text(len(plan.layers), 'layer')} in {stages}",
            *([f"{replicas} replicas"] if replicas > 1 else []),
            count_text(plan.num_microbatches, "micro-batch"),
            str(plan.schedule),
        )
    )
