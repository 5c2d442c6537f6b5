"""How long it takes to make, lower, prove and simulate a million instructions."""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any, TypeVar

from benchmarks.report import Column, Load, Report, counts, parser, progress, publish
from penstock import schedules
from penstock.schedules import Family, Schedule
from penstock.schedules.laws import verify
from penstock.schedules.passes import add_commits, add_communication
from penstock.schedules.transfers import chain_transfers
from penstock.schedules.walk import collection_paused
from penstock.simulator import UNIT_COSTS, simulate

TARGET_S = 5.0
MILLION = 1_000_000

PARTS = ("make", "lower", "prove", "simulate", "together", "break down")

COLUMNS = (
    Column("schedule", "schedule"),
    Column("K", "num_stages"),
    Column("M", "num_microbatches", ","),
    Column("instructions", "instructions", ","),
    *(Column(f"{part}: s", f"{part}_s", ".2f") for part in PARTS),
)

_T = TypeVar("_T")


def timed(function: Callable[[], _T]) -> tuple[_T, float]:
    """Call a function; return what it returns and its CPU seconds."""
    begin_s = process_time()
    return function(), process_time() - begin_s


def measure(family: Family, num_stages: int, about: int, rounds: int) -> dict[str, Any]:
    """Measure a schedule of about so many instructions; medians over rounds, a million each."""
    num_microbatches = about // (6 * num_stages - 4)  # the ends of the chain have one neighbour
    transfers = chain_transfers(num_stages)

    def lowered(schedule: Schedule) -> Schedule:
        return add_communication(add_commits(schedule, range(num_stages)), transfers)

    rounds_s = []
    for _ in range(rounds):
        with collection_paused():
            made, make_s = timed(partial(family, num_stages, num_microbatches))
            schedule, lower_s = timed(partial(lowered, made))
            _, prove_s = timed(partial(verify, schedule, transfers, family.laws))
        timeline, simulate_s = timed(partial(simulate, schedule, UNIT_COSTS))
        _, breakdown_s = timed(timeline.breakdown)
        parts_s = (make_s, lower_s, prove_s, simulate_s)
        rounds_s.append((*parts_s, sum(parts_s), breakdown_s))
    instructions = sum(map(len, schedule.programs))
    parts = zip(*rounds_s, strict=True)
    of_a_million_s = [median(part_s) * MILLION / instructions for part_s in parts]
    return {
        "schedule": str(family),
        "num_stages": num_stages,
        "num_microbatches": num_microbatches,
        "instructions": instructions,
        **dict(zip((f"{part}_s" for part in PARTS), of_a_million_s, strict=True)),
    }


WRITTEN = (
    *(schedules.gpipe, schedules.one_f_one_b, schedules.eager_1f1b),
    schedules.interleaved_1f1b(2),
)
"""Families that know a schedule without trying several."""


def run(options: argparse.Namespace) -> Report:
    """Measure every schedule at every number of stages."""
    load = Load.now()
    rounds, about = (2, 6_000) if options.smallest else (options.rounds, MILLION)
    rows = []
    for family in WRITTEN:
        for num_stages in options.num_stages:
            progress(f"{family}, K = {num_stages}")
            rows.append(measure(family, num_stages, about, rounds))
    slowest_s = max(row["together_s"] for row in rows)
    verdict = (
        f"{slowest_s:.1f} s at most for a million instructions; the target is {TARGET_S:.0f} s."
    )
    settings = {"rounds": rounds, "load before": f"{load.before:.2f}"}
    return Report(COLUMNS, tuple(rows), settings, (verdict, *load.notes))


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    options = parser(__doc__ or "")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--num-stages", type=counts, default=(16, 256), metavar="K,K,...")
    chosen = options.parse_args(arguments)
    publish(run(chosen), chosen, Path(__file__).parent)


if __name__ == "__main__":
    main()
