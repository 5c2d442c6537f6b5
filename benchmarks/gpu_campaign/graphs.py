"""Steps as one CUDA graph beside eager ones: times, memory and bits."""

import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from benchmarks.gpu_campaign.contestants import Work, piped
from benchmarks.gpu_campaign.measure import Memory, Row, Step, kernels_ms, medians, rows_of
from penstock import Pipeline, Recompute
from penstock.schedules import gpipe, interleaved_1f1b, one_f_one_b, zb_h1

NUM_EQUAL = 5
"""Steps whose losses and gradients are compared, each followed by an update."""
CASES: dict[str, tuple[int, Any, dict[str, Any]]] = {
    "K = 4, 1F1B": (4, one_f_one_b, {}),
    "K = 1, GPipe": (1, gpipe, {}),
    "K = 4, 1F1B, dropout, recompute": (
        *(4, one_f_one_b),
        {"dropout": 0.1, "recompute": Recompute.STAGE},
    ),
    "K = 4, zero bubble": (4, zb_h1(), {}),
    "K = 4, interleaved": (4, interleaved_1f1b(2), {}),
    "K = 2, 1F1B": (2, one_f_one_b, {}),
    "K = 4, GPipe": (4, gpipe, {}),
    "K = 2, GPipe": (2, gpipe, {}),
}


def rows(work: Work, until: float) -> Iterator[Row]:
    """Yield a row for each schedule and K, the most important first."""
    cases = {
        name: partial(_row, work, num_stages, schedule, **options)
        for name, (num_stages, schedule, options) in CASES.items()
    }
    return rows_of(cases, until)


def _row(
    work: Work,
    num_stages: int,
    schedule: Any,
    dropout: float = 0.0,
    recompute: Recompute = Recompute.NEVER,
) -> Row:
    """Measure eager steps, then graphs while the eager pipeline waits, then compare both."""
    work = replace(work, dropout=dropout)
    make = partial(piped, work, num_stages, schedule=schedule, recompute=recompute)
    memory = Memory(work.device)
    with make() as eager:
        of_eager = {f"eager_{key}": v for key, v in _measured(work, eager, memory).items()}
        if work.device.type != "cuda":
            return {**of_eager, "remark": "no graphs on cpu"}
        memory = Memory(work.device)
        with make(cuda_graphs=True) as graphed, warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            row = _measured(work, graphed, memory) | of_eager
            row["equal_bits"] = _are_equal(work, eager, graphed)
        row |= _kernels(work, eager)
    row["peak_ratio"] = row["peak_gib"] / max(row["eager_peak_gib"], 1e-9)
    remarks = {str(one.message) for one in told if "cuda_graphs=True" in str(one.message)}
    return row | ({"remark": "; ".join(remarks)} if remarks else {})


def _step(work: Work, pipe: Pipeline) -> Step:
    words = work.words()
    return lambda: pipe.train_step(words, words)


def _measured(work: Work, pipe: Pipeline, memory: Memory) -> Row:
    step = _step(work, pipe)
    return medians(pipe, step, work.device, work.num_steps) | memory.peak()


def _kernels(work: Work, pipe: Pipeline) -> Row:
    """Return the time of the kernels of an eager step; a profiled step is never a replay."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # under a profiler, all stages run in this thread
        return {"kernels_ms": kernels_ms(pipe, _step(work, pipe), work.device)}


def _are_equal(work: Work, eager: Pipeline, graphed: Pipeline) -> bool:
    """Train both, which have made equally many steps of equal weights; compare all bits."""
    steps, same = [(pipe, _step(work, pipe)) for pipe in (eager, graphed)], True
    for _ in range(NUM_EQUAL):
        found = []
        for pipe, step in steps:
            pipe.zero_grad()
            found.append([step().clone(), *(p.grad for p in pipe.parameters())])
        same &= all(a is not None and torch.equal(a, b) for a, b in zip(*found, strict=True))
        with torch.no_grad():
            for p in (*eager.parameters(), *graphed.parameters()):
                assert p.grad is not None
                p.sub_(p.grad, alpha=0.1)
    return same
