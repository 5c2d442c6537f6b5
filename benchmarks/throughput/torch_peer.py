"""torch.distributed.pipelining, one process a stage; or two stages a process, interleaved."""

from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

from benchmarks.throughput.contestants import NUM_STAGES, Work
from benchmarks.throughput.processes import Key, Part

STAGES_PER_PROCESS = {"ScheduleGPipe": 1, "Schedule1F1B": 1, "ScheduleInterleaved1F1B": 2}
PREFIX = "torch "
NAMES = tuple(PREFIX + schedule for schedule in STAGES_PER_PROCESS)


def prepare(rank: int, work: Work, counts: tuple[int, ...]) -> dict[Key, Part]:
    """Make the schedules of every number of micro-batches; those of a kind share their layers."""
    dist.init_process_group("gloo")
    parts = {}
    for schedule, per_process in STAGES_PER_PROCESS.items():
        mine = _own_stages(work, rank, per_process)
        for count in counts:
            parts[PREFIX + schedule, count] = _part(schedule, count, mine, rank, work)
    return parts


def _own_stages(work: Work, rank: int, per_process: int) -> dict[int, nn.Sequential]:
    """Cut the model into `per_process` stages a process; process 0 has stages 0, 2, ..."""
    num_stages = NUM_STAGES * per_process
    layers, size = list(work.model()), work.num_blocks // num_stages
    return {
        stage: nn.Sequential(*layers[stage * size : (stage + 1) * size])
        for stage in range(rank, num_stages, NUM_STAGES)
    }


def _part(
    schedule: str, num_microbatches: int, mine: dict[int, nn.Sequential], rank: int, work: Work
) -> Part:
    from torch.distributed import pipelining

    num_stages, size = NUM_STAGES * len(mine), work.num_blocks // (NUM_STAGES * len(mine))
    stages = [
        pipelining.PipelineStage(module, stage, num_stages, torch.device("cpu"))
        for stage, module in mine.items()
    ]
    of_several = STAGES_PER_PROCESS[schedule] > 1
    run: Any = getattr(pipelining, schedule)(
        stages if of_several else stages[0], num_microbatches, loss_fn=mse_loss
    )
    inputs, targets = work.data()

    def run_step() -> None:
        for module in mine.values():
            module.zero_grad()
        if rank == 0:
            run.step(inputs, return_outputs=False)
        else:
            run.step(target=targets, losses=[], return_outputs=False)

    layers = {
        stage * size + place: layer
        for stage, module in mine.items()
        for place, layer in enumerate(module)
    }
    return Part(run_step, layers)
