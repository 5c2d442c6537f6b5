"""A plan on a page: what was chosen and why, and the table of its stages."""

from penstock.costs.cluster import Cluster
from penstock.trace.page import Page, Section, Step, Table, Text, with_step
from penstock.trace.units import count_text

from .plan import Plan
from .rank import Candidates
from .reasons import HEADS, choice_rows


def plan_page(plan: Plan, choices: Candidates, cluster: Cluster) -> Page:
    """Return the page of a plan that was chosen for a cluster."""
    best = choices.best[0].predicted
    devices = [cluster.device_of(place) for place in best.places]
    limits = tuple(devices[rank].memory_bytes for rank in plan.placement.peers_in(0))
    step = Step(predicted=best.timeline, optimizer_s=best.update_s, memory_limits_bytes=limits)
    sections = (
        Section("Candidates", (Table(HEADS, tuple(choice_rows(choices))),)),
        plan_section(plan),
        Section("Cluster", (Text(str(cluster), "code"),)),
    )
    page = Page(f"Plan for {cluster.name}", plan_subtitle(plan), sections=sections)
    return with_step(page, step)


def plan_section(plan: Plan) -> Section:
    """Write a plan as a section of a page."""
    heads, *rows = (tuple(row) for row in plan.rows)
    lines = (line for each in plan.reasons for line in each.splitlines())
    return Section("Plan", (*map(Text, lines), Table(heads, tuple(rows))))


def plan_subtitle(plan: Plan) -> str:
    """Say in a line what a plan runs."""
    replicas, stages = plan.placement.num_replicas, count_text(plan.num_stages, "stage")
    layers, microbatches = len(plan.layers), count_text(plan.num_microbatches, "micro-batch")
    many = f", {replicas} replicas" if replicas > 1 else ""
    if plan.placement.is_regular and plan.placement.most_shards > 1:
        many += f", {plan.placement.most_shards} shards"
    return f"{count_text(layers, 'layer')} in {stages}{many}, {microbatches}, {plan.schedule}"
