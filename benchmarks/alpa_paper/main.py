"""The throughput of Alpa's paper, predicted for its models and machines with every baseline."""

import argparse
import csv
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks.report import Column, Load, Report, counts, parser, progress, publish
from penstock.automatic.baselines import BASELINES, plan_baseline
from penstock.automatic.choose import MeshTask, plan_on_meshes
from penstock.errors import PlanError
from penstock.planner.plan import Plan
from penstock.planner.stage_rows import segments_of
from penstock.types import Recompute

from .subjects import DEVICES, GPT, MOE, RESNET, Subject, subjects

AUTO = "auto"
SIZES = {GPT: (1, 2, 4, 8, 16), MOE: (1, 2), RESNET: (1, 2, 4)}
"""Numbers of devices that are planned for unless others are asked for: a few minutes."""
_TIMES = (1, 2, 4, 8)
"""Times as many micro-batches as Alpa has: the first with which a plan fits."""
_CLOSE = 1e-9

Published = dict[tuple[str, str, int, str], float]


def columns(published: Published) -> tuple[Column, ...]:
    """Return the columns of the table: TFLOPS per device of each system, published ones last."""
    systems = dict.fromkeys(system for *_, system in published)
    return (
        Column("table", "table"),
        Column("model", "model"),
        Column("devices", "devices"),
        Column("M", "num_microbatches"),
        Column("PFLOPS", "pflops", ".3f"),
        Column("auto", AUTO, ".1f"),
        *(Column(name, name, ".1f") for name in BASELINES),
        *(Column(f"published: {name}", f"published {name}", ".1f") for name in systems),
        Column("search: s", "search_s", ".1f"),
        Column("plan", "plan"),
    )


def read_published(path: Path) -> Published:
    """Read lines of table, model, devices, system and TFLOPS per device, with tabs between."""
    with path.open(newline="") as file:
        rows = [row for row in csv.reader(file, delimiter="\t") if row and row[2].isdecimal()]
    return {(table, model, int(n), system): float(x) for table, model, n, system, x in rows}


@dataclass
class Planned:
    """The plans of one model: of auto and of each baseline that something fits for."""

    subject: Subject
    task: MeshTask
    search_s: float = 0.0

    def auto(self, number: int) -> Plan:
        """Return the plan of the whole search, and count its seconds."""
        begin_s = perf_counter()
        try:
            return plan_on_meshes(replace(self.task, num_microbatches=number))
        finally:
            self.search_s += perf_counter() - begin_s

    def baseline(self, name: str, number: int) -> Plan:
        """Return the plan of a baseline."""
        return plan_baseline(name, replace(self.task, num_microbatches=number))

    def first_that_fits(self, make: Callable[[int], Plan]) -> Plan | None:
        """Return a plan with as many micro-batches as Alpa has, or else with more."""
        for times in _TIMES:
            number = self.subject.num_microbatches * times
            if self.task.batch_size % number == 0:
                with suppress(PlanError):
                    return make(number)
        return None

    def all(self) -> dict[str, Plan]:
        """Return every plan; auto has the number of micro-batches of a faster baseline, too."""
        found = {AUTO: self.first_that_fits(self.auto)}
        for name in BASELINES:
            found[name] = self.first_that_fits(partial(self.baseline, name))
        plans = {name: plan for name, plan in found.items() if plan is not None}
        if AUTO not in plans:
            return plans
        tried = {plans[AUTO].num_microbatches}
        for plan in sorted(plans.values(), key=step_s):
            if step_s(plan) < step_s(plans[AUTO]) and plan.num_microbatches not in tried:
                tried.add(plan.num_microbatches)
                plans[AUTO] = min(plans[AUTO], self.auto(plan.num_microbatches), key=step_s)
        return plans

    def tflops(self, plan: Plan) -> float:
        """Return TFLOPS per device."""
        number = plan.num_microbatches
        flops = self.subject.flops(self.task.graph_of(number), number)
        return flops / step_s(plan) / self.subject.num_devices / 1e12


def step_s(plan: Plan) -> float:
    """Return the seconds of a step."""
    assert plan.predicted_step_s is not None, "it was simulated"
    return plan.predicted_step_s


def measure(subject: Subject, published: Published) -> tuple[dict[str, Any], list[str]]:
    """Plan a model with every system; return a row, and what is surprising."""
    title = f"{subject.table} {subject.name}"
    progress(f"{title} on {subject.num_devices}")
    key = subject.table, subject.name, subject.num_devices
    row: dict[str, Any] = {"table": key[0], "model": key[1], "devices": key[2]}
    row |= {f"published {own[3]}": x for own, x in published.items() if own[:3] == key}
    planned = Planned(subject, subject.task())
    plans = planned.all()
    row["search_s"] = planned.search_s
    if AUTO not in plans:
        return row, [f"{title}: nothing fits."]
    row |= {name: planned.tflops(plan) for name, plan in plans.items()}
    best = plans[AUTO]
    row["pflops"] = row[AUTO] * subject.num_devices / 1e3
    row["num_microbatches"], row["plan"] = best.num_microbatches, plan_text(best)
    notes = [
        f"{title}: {name} is faster than auto, {row[name]:.1f} against {row[AUTO]:.1f} TFLOPS: "
        f"{plan_text(plan)}, M = {plan.num_microbatches}."
        for name, plan in plans.items()
        if step_s(plan) < step_s(best) * (1 - _CLOSE)
    ]
    if best.num_microbatches != subject.num_microbatches:
        own = f"{title}: auto has M = {best.num_microbatches}; with Alpa's"
        notes.append(f"{own}, {subject.num_microbatches}, nothing fits or a step is slower.")
    return row, notes


def plan_text(plan: Plan) -> str:
    """Return the layers of each stage, and its mesh where it has several devices."""
    rows = [*segments_of(plan)]
    stages = (
        f"{sum(plan.partition[n] for n in own)} on "
        f"{'x'.join(map(str, plan.placement.shard_axes_of(own[0])))}"
        for own in rows
    )
    how = ", recompute" if Recompute.STAGE in plan.recompute else ""
    how += " each layer" if len(rows) < plan.num_stages else ""
    family = dict(plan.schedule.arguments).get("base", plan.schedule.name)
    return f"{', '.join(stages)}; {family}{how}"


def run(options: argparse.Namespace) -> Report:
    """Plan every model on its devices."""
    load = Load.now()
    published = read_published(options.published) if options.published else {}
    tables = (GPT,) if options.smallest else (GPT, MOE, RESNET)
    every = list(subjects(tables))
    sizes = dict.fromkeys(tables, options.sizes) if options.sizes else SIZES
    sizes = {GPT: (2,)} if options.smallest else sizes
    chosen = [own for own in every if own.num_devices in sizes[own.table]]
    rows, notes = [], []
    for subject in chosen:
        row, found = measure(subject, published)
        rows.append(row)
        notes += found
    out = [f"{own.table} on {own.num_devices}" for own in every if own not in chosen]
    notes += [f"Larger ones left out: {', '.join(out)}."] if out else []
    settings = {"fitted constants": "none", "load before": f"{load.before:.2f}"}
    return Report(columns(published), tuple(rows), settings, _as_list(notes))


def _as_list(notes: Sequence[str]) -> tuple[str, ...]:
    return ("", *(f"- {note}" for note in notes))


def main(arguments: list[str] | None = None) -> None:
    """Plan and print."""
    options = parser(__doc__ or "")
    options.add_argument(
        "--sizes", type=counts, metavar="N,N", help=f"numbers of devices, of {DEVICES}"
    )
    options.add_argument("--published", type=Path, metavar="FILE", help="figures to print beside")
    chosen = options.parse_args(arguments)
    publish(run(chosen), chosen, Path(__file__).parent)


if __name__ == "__main__":
    main()
