"""How long it takes to lower, prove and simulate a schedule of a million instructions."""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import process_time
from typing import Any, TypeVar

from benchmarks.report import Column, Load, Report, counts, parser, progress, publish
from penstock import schedules
from penstock.schedules import Family
from penstock.schedules.lower import Lowering, lower
from penstock.schedules.transfers import chain_transfers
from penstock.simulator import UNIT_COSTS, simulate

TARGET_S = 5.0
MILLION = 1_000_000

COLUMNS = (
    Column("schedule", "schedule"),
    Column("K", "num_stages"),
    Column("M", "num_microbatches", ","),
    Column("instructions", "instructions", ","),
    Column("lower and prove: s", "lower_s", ".2f"),
    Column("simulate: s", "simulate_s", ".2f"),
    Column("together: s", "together_s", ".2f"),
    Column("break down: s", "breakdown_s", ".2f"),
)

_T = TypeVar("_T")


def timed(function: Callable[[], _T]) -> tuple[_T, float]:
    """Call a function; return what it returns and its CPU seconds."""
    begin_s = process_time()
    return function(), process_time() - begin_s


def measure(family: Family, num_stages: int, about: int, rounds: int) -> dict[str, Any]:
    """Measure a schedule of about so many instructions; the fastest of each part over rounds."""
    num_microbatches = about // (6 * num_stages - 4)  # the ends of the chain have one neighbour
    how = Lowering(
        family=family,
        ranks=family.ranks(num_stages),
        transfers=chain_transfers(num_stages),
        commits=range(num_stages),
    )
    make = partial(lower, how, num_microbatches)
    times_s = []
    for _ in range(rounds):
        schedule, lower_s = timed(make)
        timeline, simulate_s = timed(partial(simulate, schedule, UNIT_COSTS))
        _, breakdown_s = timed(timeline.breakdown)
        times_s.append((lower_s, simulate_s, lower_s + simulate_s, breakdown_s))
    parts = ("lower_s", "simulate_s", "together_s", "breakdown_s")
    return {
        "schedule": str(family),
        "num_stages": num_stages,
        "num_microbatches": num_microbatches,
        "instructions": sum(map(len, schedule.programs)),
        **dict(zip(parts, map(min, *times_s), strict=True)),
    }


def run(options: argparse.Namespace) -> Report:
    """Measure every schedule at every number of stages."""
    load = Load.now()
    rounds, about = (2, 6_000) if options.smallest else (options.rounds, MILLION)
    rows = []
    for family in (*schedules.ALL_SCHEDULES, schedules.interleaved_1f1b(2)):
        for num_stages in options.num_stages:
            progress(f"{family}, K = {num_stages}")
            rows.append(measure(family, num_stages, about, rounds))
    slowest_s = max(row["together_s"] for row in rows)
    verdict = (
        f"{slowest_s:.1f} s at most to lower, prove and simulate; the target is {TARGET_S:.0f} s."
    )
    settings = {"rounds": rounds, "load before": f"{load.before:.2f}"}
    return Report(COLUMNS, tuple(rows), settings, (verdict, *load.notes))


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    options = parser(__doc__ or "")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--num-stages", type=counts, default=(16, 100), metavar="K,K,...")
    chosen = options.parse_args(arguments)
    publish(run(chosen), chosen, Path(__file__).parent)


if __name__ == "__main__":
    main()
