"""A plan on a page: what was chosen and why, and the table of its stages."""

from penstock.trace.page.page import Section, Table, Text
from penstock.trace.units import count_text

from .plan import Plan


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
