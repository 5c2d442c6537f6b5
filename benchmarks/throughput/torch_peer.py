"""torch.distributed.pipelining, one process a stage; or two stages a process."""

from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.functional import mse_loss

from benchmarks.throughput.contestants import NUM_STAGES, Work
from benchmarks.throughput.processes import Key, Part

ONE_STAGE = ("ScheduleGPipe", "Schedule1F1B")
IN_TURN = ("ScheduleLoopedBFS", "ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble")
VEE = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
SCHEDULES = (*ONE_STAGE, *IN_TURN, *VEE)
PREFIX = "torch "
NAMES = tuple(PREFIX + schedule for schedule in SCHEDULES)


def prepare(rank: int, work: Work, counts: tuple[int, ...]) -> dict[Key, Part]:
    """Make the schedules of every number of micro-batches; those of one share their layers."""
    dist.init_process_group("gloo")
    parts = {}
    for schedule in SCHEDULES:
        ranks = ranks_of(schedule, NUM_STAGES)
        mine = own_stages(work.model(), rank, ranks)
        for count in counts:
            parts[PREFIX + schedule, count] = part(schedule, count, mine, len(ranks), work.data())
    return parts


def ranks_of(schedule: str, num_ranks: int) -> tuple[int, ...]:
    """Return the rank of each stage."""
    forth = tuple(range(num_ranks))
    if schedule in ONE_STAGE:
        return forth
    return forth + (forth[::-1] if schedule in VEE else forth)


def own_stages(
    model: nn.Sequential, rank: int, ranks: tuple[int, ...]
) -> dict[int, nn.Sequential]:
    """Cut the model into stages of as many layers; return those of one rank."""
    layers, size = list(model), len(model) // len(ranks)
    return {
        stage: nn.Sequential(*layers[stage * size : (stage + 1) * size])
        for stage, its_rank in enumerate(ranks)
        if its_rank == rank
    }


def part(
    schedule: str,
    num_microbatches: int,
    mine: dict[int, nn.Sequential],
    num_stages: int,
    data: tuple[Tensor, Tensor],
) -> Part:
    """Make a schedule of a rank's own stages that trains on the same batch at each step."""
    from torch.distributed import pipelining

    stages = [
        pipelining.PipelineStage(module, stage, num_stages, torch.device("cpu"))
        for stage, module in mine.items()
    ]
    run: Any = getattr(pipelining, schedule)(
        stages if len(stages) > 1 else stages[0], num_microbatches, loss_fn=mse_loss
    )
    inputs, targets = data

    def run_step() -> None:
        for module in mine.values():
            module.zero_grad()
        given: Any = {"target": targets, "losses": []} if num_stages - 1 in mine else {}
        run.step(*([inputs] if 0 in mine else []), return_outputs=False, **given)

    layers = {
        stage * len(module) + place: layer
        for stage, module in mine.items()
        for place, layer in enumerate(module)
    }
    return Part(run_step, layers)
