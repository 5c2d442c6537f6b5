"""The throughput of Alpa's paper, predicted for its models and machines with every baseline."""

import argparse
import csv
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
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
from penstock.planner.make_plan import Choice
from penstock.planner.plan import Plan
from penstock.types import Recompute

from .baselines import BASELINES, step_s
from .picture import Picture
from .planned import AUTO, HANDOVERS, Planned
from .subjects import ALPAS, DEVICES, GPT, MOE, NEWEST, RESNET, Subject, subjects

_TABLES = GPT, MOE, RESNET
_LIMIT_S = 180
_CLOSE = 1e-9
INTERRUPTED = "was interrupted"

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
class Found:
    """The results of a model: its row and picture, its surprises, or why it is missing."""

    subject: Subject
    row: dict[str, Any] | None = None
    notes: Sequence[str] = ()
    picture: Picture | None = None
    why_not: str | None = None


def measured(subject: Subject, published: Published, limit_s: int) -> Found:
    """Plan a model with every system, unless that takes longer than the limit."""
    try:
        with at_most(limit_s):
            return _measured(subject, published)
    except TooLongError:
        return Found(subject, why_not=f"takes more than {limit_s} s")
    except KeyboardInterrupt:
        return Found(subject, why_not=INTERRUPTED)


def in_turn(chosen: Sequence[Subject], published: Published, limit_s: int) -> Iterator[Found]:
    """Yield what is found, of small models first; none that is larger than a slow one."""
    slow = set[str]()
    for subject in chosen:
        if subject.table in slow:
            yield Found(subject, why_not="a smaller one takes too long")
            continue
        yield (found := measured(subject, published, limit_s))
        if found.why_not is not None:
            is_all = found.why_not == INTERRUPTED
            slow |= {own.table for own in chosen} if is_all else {subject.table}


def at_once(
    chosen: Sequence[Subject], published: Published, limit_s: int, jobs: int
) -> Iterator[Found]:
    """Yield what is found in so many processes, the largest models first, each for itself."""
    plan = partial(measured, published=published, limit_s=limit_s)
    left = dict.fromkeys(chosen)
    ignored = signal.SIGINT, signal.SIG_IGN
    with get_context("spawn").Pool(jobs, signal.signal, ignored) as pool:
        try:
            for found in pool.imap_unordered(plan, chosen[::-1]):
                del left[found.subject]
                yield found
        except KeyboardInterrupt:
            yield from (Found(subject, why_not=INTERRUPTED) for subject in left)
        else:
            assert not left, "a StopIteration of a process would end the loop as well"


def _measured(subject: Subject, published: Published) -> Found:
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
        return Found(subject, row, [f"{title}: nothing fits."])
    row |= {name: planned.tflops(plan) for name, plan in plans.items()}
    row |= _of_auto(planned, choice)
    where = f"{title} on {subject.num_devices} devices"
    picture = Picture.of(where, planned.task, choice)
    return Found(subject, row, [*_surprises(planned, choice.plan, plans)], picture)


def _of_auto(planned: Planned, choice: Choice) -> dict[str, Any]:
    own = planned.tflops(choice.plan)
    handed = {name: planned.handed_over(choice, name) for name in HANDOVERS}
    return {
        AUTO: own,
        "pflops": own * planned.subject.num_devices / 1e3,
        "num_microbatches": choice.plan.num_microbatches,
        "plan": plan_text(choice.plan),
        **{name: planned.tflops(plan) for name, plan in handed.items()},
        **planned.seconds(),
    }


def _surprises(planned: Planned, best: Plan, plans: dict[str, Plan]) -> Iterator[str]:
    subject, own = planned.subject, planned.tflops(best)
    title = f"{subject.table} {subject.name}"
    for name, plan in plans.items():
        if step_s(plan) < step_s(best) * (1 - _CLOSE):
            yield (
                f"{title}: {name} is faster than auto, {planned.tflops(plan):.1f} against "
                f"{own:.1f} TFLOPS: {plan_text(plan)}, M = {plan.num_microbatches}."
            )
    if best.num_microbatches != subject.num_microbatches:
        yield (
            f"{title}: auto has M = {best.num_microbatches}; with Alpa's, "
            f"{subject.num_microbatches}, nothing fits or a step is slower."
        )


def plan_text(plan: Plan) -> str:
    """Return the layers of each stage, and its mesh where it has several devices."""
    stages = (
        f"{number} on {'x'.join(map(str, plan.placement.shard_axes_of(stage)))}"
        for stage, number in enumerate(plan.partition)
    )
    again = {own.value: 0 for own in plan.recompute if own is not Recompute.NEVER}
    how = f", recompute {' and '.join(again)}" if again else ""
    return f"{', '.join(stages)}; {plan.schedule.name}{how}"


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
    load = Load.now()
    published = read_published(options.published) if options.published else {}
    tables = (GPT,) if options.smallest else options.models
    chosen = [own for own in subjects(tables) if own.num_devices in options.sizes]
    chosen.sort(key=lambda own: own.num_devices)
    how = chosen, published, options.limit
    found = [*(in_turn(*how) if options.jobs == 1 else at_once(*how, options.jobs))]
    found.sort(key=lambda own: (tables.index(own.subject.table), own.subject.num_devices))
    rows = [own.row for own in found if own.row is not None]
    settings = {"fitted constants": "none", "load before": f"{load.before:.2f}"}
    missing = ", ".join(
        f"{own.subject.table} on {own.subject.num_devices} ({own.why_not})"
        for own in found
        if own.why_not is not None
    )
    left_out = [f"Left out: {missing}."] if missing else []
    notes = _as_list([*(note for own in found for note in own.notes), *left_out])
    further = ("", *table_lines(FURTHER, rows))
    report = Report(columns(published), tuple(rows), settings, (*notes, *further))
    pictures = [own.picture for own in found if own.picture is not None]
    draw = pictures[-1].draw if pictures else None
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
        "--models",
        nargs="+",
        choices=_TABLES,
        default=_TABLES,
        help="of which models there are rows",
    )
    options.add_argument(
        "--limit",
        type=int,
        metavar="SECONDS",
        default=_LIMIT_S,
        help="leave out what takes longer to plan, with all that is larger",
    )
    options.add_argument(
        "--jobs",
        type=int,
        metavar="N",
        default=1,
        help="plan so many models at a time: none is left out because a smaller one takes long",
    )
    options.add_argument("--published", type=Path, metavar="FILE", help="figures to print beside")
    chosen = options.parse_args(arguments)
    if chosen.smallest:
        chosen.sizes = (2,)
    for each in _ENDS:
        signal.signal(each, _interrupt)
    run(chosen)


_ENDS = signal.SIGINT, signal.SIGTERM


def _interrupt(*_: Any) -> None:
    """End the search, once: what was found is printed then."""
    for each in _ENDS:
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
