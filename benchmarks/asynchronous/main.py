"""Samples per second with and without a flush after every mini-batch: two stages in threads."""

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.nn.functional import mse_loss

from benchmarks.blocks import transformer
from benchmarks.report import Column, Load, Report, interleaved, parser, progress, publish
from penstock import Pipeline, Recompute, Transport, schedules
from penstock.schedules import Family
from penstock.schedules.names import SYNCHRONOUS_FAMILIES, by_default

NUM_STAGES = 2
COLUMNS = (
    Column("schedule", "schedule"),
    Column("M", "num_microbatches"),
    Column("mini-batches without a flush", "window"),
    Column("samples/s", "samples_per_s", ".1f"),
    Column("share of the ideal of 1F1B", "share", ".3f"),
)


def contestants() -> list[Family]:
    """Give the schedules that are compared: all synchronous ones first."""
    everyone = map(by_default, SYNCHRONOUS_FAMILIES)
    return [*everyone, schedules.pipedream(), schedules.pipedream_2bw]


def trains(family: Family, settings: argparse.Namespace) -> Callable[[], float]:
    """Return what trains on the mini-batches once, and gives the seconds that it took."""
    num_stages = NUM_STAGES * family.stages_per_rank
    layers = transformer(settings.blocks, settings.width, 4)
    pipe = Pipeline(
        layers,
        partition=[settings.blocks // num_stages] * num_stages,
        num_microbatches=settings.microbatches,
        loss=mse_loss,
        schedule=family,
        recompute=Recompute.NEVER,
        transport=Transport.THREADS,
        threads_per_stage=1,
        devices="cpu",
    )
    optimizer = torch.optim.SGD(pipe.parameters(), lr=1e-4, momentum=0.9)
    x = torch.randn(settings.samples, settings.tokens, settings.width)

    def run() -> float:
        start_s = time.perf_counter()
        pipe.train_steps([(x, x)] * settings.window, optimizer)
        return time.perf_counter() - start_s

    return run


def plain(settings: argparse.Namespace) -> Callable[[], float]:
    """Return the same work without a pipeline: what the ideal is counted from."""
    model = transformer(settings.blocks, settings.width, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    x = torch.randn(settings.samples, settings.tokens, settings.width)

    def run() -> float:
        torch.set_num_threads(1)
        start_s = time.perf_counter()
        for _ in range(settings.window):
            for part in x.chunk(settings.microbatches):
                (mse_loss(model(part), part) / settings.microbatches).backward()
            optimizer.step()
            optimizer.zero_grad()
        return time.perf_counter() - start_s

    return run


def measure(settings: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure all schedules in turn; the median of the rounds counts."""
    families = contestants()
    runs = [plain(settings), *map(partial(trains, settings=settings), families)]
    columns = interleaved(runs, settings.rounds)
    alone_s, *seconds = map(median, columns)
    m = settings.microbatches
    ideal = NUM_STAGES * m / (m + NUM_STAGES - 1)
    return [
        {
            "schedule": repr(family),
            "num_microbatches": m,
            "window": settings.window if family.is_asynchronous else 1,
            "samples_per_s": settings.samples * settings.window / took_s,
            "share": alone_s / took_s / ideal,
        }
        for family, took_s in zip(families, seconds, strict=True)
    ]


def main() -> None:
    """Measure, print the table, and write it where the options say."""
    options = parser(__doc__ or "").parse_args()
    load = Load.now()
    settings = argparse.Namespace(
        blocks=8, width=128, tokens=64, samples=16, microbatches=4, window=8, rounds=5
    )
    if options.smallest:
        vars(settings).update(blocks=4, width=16, tokens=4, samples=4, window=2, rounds=1)
    progress("training with each schedule in turn")
    rows = measure(settings)
    told = {name: value for name, value in vars(settings).items() if name != "microbatches"}
    report = Report(COLUMNS, tuple(rows), {"stages": NUM_STAGES} | told, load.notes)
    publish(report, options, Path(__file__).parent)


if __name__ == "__main__":
    main()
