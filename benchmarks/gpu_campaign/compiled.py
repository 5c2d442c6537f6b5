"""Layers compiled by torch.compile, in plain torch and in Penstock, beside those that are not."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from importlib import import_module

import torch

from benchmarks.gpu_campaign.contestants import CONTESTANTS, Work
from benchmarks.gpu_campaign.measure import Row, medians, rows_of, timed

_NAMES = ("Penstock, K = 4, GPipe", "plain torch", "Penstock, K = 1")


def rows(work: Work, until: float) -> Iterator[Row]:
    """Yield a row for each, compiled and not; on a CPU no code is made: backend "eager"."""
    backend = "inductor" if work.device.type == "cuda" else "eager"
    cases: dict[str, Callable[[], Row]] = {}
    for name in _NAMES:
        cases[f"{name}, compiled"] = partial(_row, replace(work, backend=backend), name)
        cases[name] = partial(_row, work, name)
    return rows_of(cases, until)


def _row(work: Work, name: str) -> Row:
    """Measure the first step, with the compiler's work, and later ones; count the graphs."""
    torch.compiler.reset()
    counters = import_module("torch._dynamo.utils").counters
    counters.clear()
    model, step, close = CONTESTANTS[name](work)
    try:
        first_ms = timed(model, step, work.device)[1]
        row = medians(model, step, work.device, work.num_steps)
    finally:
        close()
    return row | {
        "first_step_s": first_ms / 1000,
        "num_graphs": counters["stats"]["unique_graphs"],
    }
