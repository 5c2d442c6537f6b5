"""torch.distributed.pipelining, one process a stage; or two stages a process."""

from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

from benchmarks.throughput.contestants import NUM_STAGES, Work
from benchmarks.throughput.processes import Key, Part

IN_TURN, VEE = (0, 1, 0, 1), (0, 1, 1, 0)
RANKS = {
    "ScheduleGPipe": (0, 1),
    "Schedule1F1B": (0, 1),
    "ScheduleLoopedBFS": IN_TURN,
    "ScheduleInterleaved1F1B": IN_TURN,
    "ScheduleInterleavedZeroBubble": IN_TURN,
    "ScheduleZBVZeroBubble": VEE,
    "ScheduleDualPipeV": VEE,
}
"""The process of each stage."""
PREFIX = "torch "
NAMES = tuple(PREFIX + schedule for schedule in RANKS)


def prepare(rank: int, work: Work, counts: tuple[int, ...]) -> dict[Key, Part]:
    """Make the schedules of every number of micro-batches; those of a kind share their layers."""
    dist.init_process_group("gloo")
    parts = {}
    for schedule, ranks in RANKS.items():
        mine = _own_stages(work, rank, ranks)
        for count in counts:
            parts[PREFIX + schedule, count] = _part(schedule, count, mine, work)
    return parts


def _own_stages(work: Work, rank: int, ranks: tuple[int, ...]) -> dict[int, nn.Sequential]:
    """Cut the model into stages; give those of one process."""
    layers, size = list(work.model()), work.num_blocks // len(ranks)
    return {
        stage: nn.Sequential(*layers[stage * size : (stage + 1) * size])
        for stage, its_rank in enumerate(ranks)
        if its_rank == rank
    }


def _part(
    schedule: str, num_microbatches: int, mine: dict[int, nn.Sequential], work: Work
) -> Part:
    from torch.distributed import pipelining

    num_stages, size = NUM_STAGES * len(mine), work.num_blocks // (NUM_STAGES * len(mine))
    stages = [
        pipelining.PipelineStage(module, stage, num_stages, torch.device("cpu"))
        for stage, module in mine.items()
    ]
    of_several = len(stages) > 1
    run: Any = getattr(pipelining, schedule)(
        stages if of_several else stages[0], num_microbatches, loss_fn=mse_loss
    )
    inputs, targets = work.data()

    def run_step() -> None:
        for module in mine.values():
            module.zero_grad()
        given: Any = {"target": targets, "losses": []} if num_stages - 1 in mine else {}
        run.step(*([inputs] if 0 in mine else []), return_outputs=False, **given)

    layers = {
        stage * size + place: layer
        for stage, module in mine.items()
        for place, layer in enumerate(module)
    }
    return Part(run_step, layers)
