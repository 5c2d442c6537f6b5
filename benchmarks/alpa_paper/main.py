"""The throughput of Alpa's paper, predicted for its models and machines with every baseline."""

import argparse
import csv
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import (
    Column,
    Load,
    Report,
    counts,
    parser,
    progress,
    publish,
    table_lines,
)
from penstock.automatic.baselines import BASELINES
from penstock.automatic.choose import MeshChoice
from penstock.planner.plan import Plan
from penstock.planner.stage_rows import segments_of
from penstock.types import Recompute

from .picture import Picture
from .planned import AUTO, HANDOVERS, Planned, step_s
from .subjects import ALPAS, DEVICES, GPT, MOE, NEWEST, RESNET, Subject, subjects

_LIMIT_S = 180
_CLOSE = 1e-9

Published = dict[tuple[str, str, int, str], float]

WHAT = (Column("table", "table"), Column("model", "model"), Column("devices", "devices"))
FURTHER = (
    *WHAT,
    Column("auto", AUTO, ".1f"),
    *(Column(f"hand over: {name}", name, ".1f") for name in HANDOVERS),
    Column("search: s", "search_s", ".1f"),
    Column("graph", "graph_s", ".1f"),
    Column("integer programs", "programs_s", ".1f"),
    Column("stages", "stages_s", ".1f"),
    Column("simulation", "simulation_s", ".1f"),
)
"""Of the second table: the plans of auto with other costs of handing over, and their search."""


def columns(published: Published) -> tuple[Column, ...]:
    """Return the columns of the table: TFLOPS per device of each system, published ones last."""
    systems = dict.fromkeys(system for *_, system in published)
    return (
        *WHAT,
        Column("M", "num_microbatches"),
        Column("PFLOPS", "pflops", ".3f"),
        Column("auto", AUTO, ".1f"),
        *(Column(name, name, ".1f") for name in BASELINES),
        *(Column(f"published: {name}", f"published {name}", ".1f") for name in systems),
        Column(f"auto on {NEWEST}", NEWEST, ".1f"),
        Column("plan", "plan"),
    )


def read_published(path: Path) -> Published:
    """Read lines of table, model, devices, system and TFLOPS per device, with tabs between."""
    with path.open(newline="") as file:
        rows = [row for row in csv.reader(file, delimiter="\t") if row and row[2].isdecimal()]
    return {(table, model, int(n), system): float(x) for table, model, n, system, x in rows}


@dataclass
class Measured:
    """What was found so far: rows, what is surprising, what was left out, and the picture."""

    rows: list[dict[str, Any]]
    notes: list[str]
    left_out: list[str]
    slow: set[str]
    picture: Picture | None = None

    def measure_all(self, chosen: Sequence[Subject], published: Published, limit_s: int) -> None:
        """Plan models, small ones first; none that is larger than one that takes too long."""
        for subject in sorted(chosen, key=lambda own: own.num_devices):
            where = f"{subject.table} on {subject.num_devices}"
            if subject.table in self.slow:
                self.left_out.append(where)
                continue
            try:
                with at_most(limit_s):
                    self.measure(subject, published)
            except TooLongError:
                self.left_out.append(f"{where} (takes more than {limit_s} s)")
                self.slow.add(subject.table)
            except KeyboardInterrupt:
                self.left_out.append(f"{where} (was interrupted)")
                self.slow |= {own.table for own in chosen}

    def measure(self, subject: Subject, published: Published) -> None:
        """Plan a model with every system."""
        title = f"{subject.table} {subject.name}"
        progress(f"{title} on {subject.num_devices}")
        key = subject.table, subject.name, subject.num_devices
        row: dict[str, Any] = {"table": key[0], "model": key[1], "devices": key[2]}
        row |= {f"published {own[3]}": x for own, x in published.items() if own[:3] == key}
        planned, newest = Planned(subject, ALPAS), Planned(subject, NEWEST)
        choice, plans = planned.all()
        if (best := newest.first_that_fits(newest.auto)) is not None:
            row[NEWEST] = newest.tflops(best.plan)
        if choice is None:
            self.notes.append(f"{title}: nothing fits.")
        else:
            row |= {name: planned.tflops(plan) for name, plan in plans.items()}
            row |= self._of_auto(planned, choice, plans)
        self.rows.append(row)

    def _of_auto(
        self, planned: Planned, choice: MeshChoice, plans: dict[str, Plan]
    ) -> dict[str, Any]:
        best, subject, own = choice.plan, planned.subject, planned.tflops(choice.plan)
        title = f"{subject.table} {subject.name}"
        for name, plan in plans.items():
            if step_s(plan) < step_s(best) * (1 - _CLOSE):
                self.notes.append(
                    f"{title}: {name} is faster than auto, {planned.tflops(plan):.1f} against "
                    f"{own:.1f} TFLOPS: {plan_text(plan)}, M = {plan.num_microbatches}."
                )
        if best.num_microbatches != subject.num_microbatches:
            self.notes.append(
                f"{title}: auto has M = {best.num_microbatches}; with Alpa's, "
                f"{subject.num_microbatches}, nothing fits or a step is slower."
            )
        if self.picture is None or subject.table == RESNET:
            where = f"{title} on {subject.num_devices} devices"
            self.picture = Picture.of(where, planned.task, choice)
        handed = {name: planned.handed_over(choice, name) for name in HANDOVERS}
        return {
            AUTO: own,
            "pflops": own * subject.num_devices / 1e3,
            "num_microbatches": best.num_microbatches,
            "plan": plan_text(best),
            **{name: planned.tflops(plan) for name, plan in handed.items()},
            **planned.seconds(),
        }


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


class TooLongError(Exception):
    """Planning took longer than it may."""


@contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """Raise `TooLongError` after so many seconds of this process, not of others beside it."""

    def stop(*_: Any) -> None:
        raise TooLongError

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def run(options: argparse.Namespace) -> None:
    """Plan every model on its devices, and print."""
    os.environ["PENSTOCK_CACHE"] = "off"  # prices of an earlier run would make the search short
    load = Load.now()
    published = read_published(options.published) if options.published else {}
    found = Measured([], [], [], set())
    tables = (GPT,) if options.smallest else (GPT, MOE, RESNET)
    chosen = [own for own in subjects(tables) if own.num_devices in options.sizes]
    found.measure_all(chosen, published, options.limit)
    rows = sorted(found.rows, key=lambda row: (tables.index(row["table"]), row["devices"]))
    settings = {"fitted constants": "none", "load before": f"{load.before:.2f}"}
    left_out = [f"Left out: {', '.join(found.left_out)}."] if found.left_out else []
    notes = _as_list([*found.notes, *left_out])
    further = ("", *table_lines(FURTHER, rows))
    report = Report(columns(published), tuple(rows), settings, (*notes, *further))
    draw = None if found.picture is None else found.picture.draw
    publish(report, options, Path(__file__).parent, draw)


def _as_list(notes: Sequence[str]) -> tuple[str, ...]:
    return ("", *(f"- {note}" for note in notes))


def main(arguments: list[str] | None = None) -> None:
    """Read the arguments, plan and print."""
    options = parser(__doc__ or "")
    options.add_argument(
        "--sizes",
        type=counts,
        metavar="N,N",
        default=DEVICES,
        help=f"numbers of devices, of {DEVICES}",
    )
    options.add_argument(
        "--limit",
        type=int,
        metavar="SECONDS",
        default=_LIMIT_S,
        help="leave out what takes longer to plan, with all that is larger",
    )
    options.add_argument("--published", type=Path, metavar="FILE", help="figures to print beside")
    chosen = options.parse_args(arguments)
    if chosen.smallest:
        chosen.sizes = (2,)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # prints what it has, too
    run(chosen)


if __name__ == "__main__":
    main()
