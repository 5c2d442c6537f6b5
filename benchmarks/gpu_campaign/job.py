"""One of two processes: its stage or replica, timed; it leaves a row and bits in a file.

python -m benchmarks.gpu_campaign.job JOB FOLDER, which has the work in a file
"""

import os
import pickle
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.gpu_campaign.contestants import Work, loss
from benchmarks.gpu_campaign.measure import NUM_WARM_UPS, Row, medians, timed
from penstock import Mesh, Pipeline, Recompute, init_mesh
from penstock.schedules import gpipe, one_f_one_b

Left = tuple[Row, dict[str, Any]]
WORK = "work.pickle"
"""The name of the file in FOLDER."""
NUM_UNTIL_REPLAY = 5
"""Steps after which one has been a replay."""
TIMEOUT_S = 50.0
"""The deadline of a wait, in seconds: it ends before the process is killed, and says what hung."""


def stages(work: Work, *, captured: bool = False) -> Left:
    """Train a stage by Penstock; leave loss and gradients of a step, the first replay's if any."""
    with init_mesh(2, device=str(work.device), timeout_s=TIMEOUT_S) as mesh:
        captured &= work.device.type == "cuda"
        pipe, words = _pipe(work, mesh, 2, one_f_one_b, captured), work.words()
        for _ in range(NUM_UNTIL_REPLAY if captured else 1):
            pipe.zero_grad()
            value = pipe.train_step(words, words)
        named = pipe.named_parameters()
        bits = {name: p.grad.cpu() for name, p in named if p.grad is not None}
        row = medians(pipe, lambda: pipe.train_step(words, words), work.device, work.num_steps)
        return row, bits | {"loss": value.cpu()}


def torch_stages(work: Work) -> Left:
    """Train a stage by torch.distributed.pipelining."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    dist.init_process_group("nccl" if work.device.type == "cuda" else "gloo")
    rank, first, words = dist.get_rank(), work.cut(2)[0], work.words()
    layers = list(work.model())
    own = nn.Sequential(*(layers[first:] if rank else layers[:first]))
    stage = PipelineStage(own, rank, 2, work.device)
    schedule = Schedule1F1B(stage, work.num_microbatches, loss_fn=loss)

    def step() -> None:
        if rank:
            schedule.step(target=words, losses=[])
        else:
            schedule.step(words)

    row = medians(own, step, work.device, work.num_steps)
    dist.destroy_process_group()
    return row, {}


def replicas(work: Work) -> Left:
    """Train a replica; its buckets are summed during the last backward, and after it.

    No argument of Penstock moves the sums.  Without the hook that tells of gradients, all sums
    begin at the end of the backward.
    """
    hook = "penstock.runtime.replicas._InBackward._add"
    with init_mesh(1, 2, device=str(work.device), timeout_s=TIMEOUT_S) as mesh:
        pipe, words = _pipe(work, mesh, 1, gpipe), work.words().chunk(2)[mesh.rank]

        def step() -> None:
            pipe.train_step(words, words)

        during, after = [], []
        for _ in range(NUM_WARM_UPS + work.num_steps):
            during.append(timed(pipe, step, work.device)[1])
            with patch(hook, lambda self, parameter: None):
                after.append(timed(pipe, step, work.device)[1])
    row = {
        "during_backward_ms": median(during[NUM_WARM_UPS:]),
        "after_backward_ms": median(after[NUM_WARM_UPS:]),
    }
    return row, {}


def _pipe(
    work: Work, mesh: Mesh, num_stages: int, schedule: Any, captured: bool = False
) -> Pipeline:
    return Pipeline(
        work.model(),
        mesh=mesh,
        partition=work.cut(num_stages),
        num_microbatches=work.num_microbatches,
        loss=loss,
        schedule=schedule,
        recompute=Recompute.NEVER,
        cuda_graphs=captured,
    )


JOBS: dict[str, Callable[[Work], Left]] = {
    "stages": stages,
    "graphs": partial(stages, captured=True),
    "torch": torch_stages,
    "replicas": replicas,
}


def main() -> None:
    """Run the job, and leave what it returns in FOLDER/RANK.pt."""
    job, folder = sys.argv[1], Path(sys.argv[2])
    work: Work = pickle.loads((folder / WORK).read_bytes())
    if work.device.type == "cuda":
        number = int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count()
        work = replace(work, device=torch.device("cuda", number))
        torch.cuda.set_device(work.device)
    torch.save(JOBS[job](work), folder / f"{os.environ['RANK']}.pt")


if __name__ == "__main__":
    main()
