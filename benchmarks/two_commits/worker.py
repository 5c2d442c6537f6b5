"""One process of one commit: runs the step that it is asked for, and says how long it took.

Runs with the commit's own checkout on PYTHONPATH, and so uses only names that both have.
It reads "blocks 8" (what, M) from stdin, a line at a time, and answers with two numbers: the
seconds of a step by the clock, and of all threads' time on a core.
"""

import gc
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import penstock
from benchmarks.blocks import transformer

NUM_STAGES, WIDTH = 2, 8
TINY_REPEATS = 8
MESH = penstock.init_mesh(num_stages=NUM_STAGES, device="cpu") if "RANK" in os.environ else None


def make(schedule: Any, num_microbatches: int, layers: Any) -> penstock.Pipeline:
    """Build a pipeline of two stages, in this process's threads or in two processes."""
    where = {"mesh": MESH} if MESH is not None else {"num_stages": NUM_STAGES}
    return penstock.Pipeline(
        layers,
        **where,
        partition=[len(layers) // NUM_STAGES] * NUM_STAGES,
        num_microbatches=num_microbatches,
        loss=mse_loss,
        schedule=schedule,
        recompute=penstock.Recompute.NEVER,
        threads_per_stage=1,
    )


def step(pipe: penstock.Pipeline, data: Tensor, repeats: int) -> None:
    """Run steps whose gradients are new each time."""
    for _ in range(repeats):
        pipe.zero_grad()
        pipe.train_step(data, data)


def blocks(num_microbatches: int) -> Callable[[], None]:
    """Return a step of 8 transformer blocks."""
    data = torch.randn(32, 64, 256)
    pipe = make(penstock.schedules.one_f_one_b, num_microbatches, transformer(8, 256, 4))
    return partial(step, pipe, data, 1)


def tiny(num_microbatches: int) -> Callable[[], None]:
    """Return steps of two small layers, which are nearly all overhead."""
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(NUM_STAGES)]
    pipe = make(penstock.schedules.gpipe, num_microbatches, layers)
    return partial(step, pipe, torch.randn(num_microbatches, WIDTH), TINY_REPEATS)


def timed(job: Callable[[], None]) -> tuple[float, float]:
    """Return what a job took: by the clock, and of all threads' time on a core."""
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    job()
    return time.perf_counter() - wall_s, time.process_time() - cpu_s


def main() -> None:
    """Answer until there is nothing more to read."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    jobs: dict[str, Callable[[], None]] = {}
    gc.freeze()
    for line in sys.stdin:
        if line not in jobs:
            what, count = line.split()
            jobs[line] = {"blocks": blocks, "tiny": tiny}[what](int(count))
        print(*timed(jobs[line]), flush=True)


main()
