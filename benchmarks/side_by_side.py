"""Runs that do not need each other, one on each core."""

import argparse
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch

from benchmarks.report import Report, publish
from penstock.planner.shared_cores import num_cores

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_Case = TypeVar("_Case")
_Found = TypeVar("_Found")


def side_by_side(
    measure: Callable[[_Case], _Found], cases: Sequence[_Case], num_jobs: int
) -> list[_Found]:
    """Give what `measure` finds of each case, in order; a job is a process with one thread.

    One job is this process.
    """
    torch.set_num_threads(1)
    if num_jobs == 1:
        return [measure(case) for case in cases]
    with ProcessPoolExecutor(
        num_jobs, get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        return list(pool.map(measure, cases))


def publish_runs(
    options: argparse.ArgumentParser,
    run: Callable[[argparse.Namespace], Report],
    draw: "Callable[[Report, Figure], None]",
    folder: Path,
    arguments: list[str] | None,
) -> None:
    """Make the runs of a benchmark, as many as the options say, and publish the report."""
    options.add_argument("--seeds", type=int, default=2, help="runs of each kind")
    options.add_argument("--jobs", type=int, default=num_cores(), help="runs at a time")
    chosen = options.parse_args(arguments)
    report = run(chosen)
    publish(report, chosen, folder, partial(draw, report))
