"""torch.distributed.pipelining on emulated devices: one process a rank."""

from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

from benchmarks.throughput.processes import Key, Part
from benchmarks.zero_bubble.emulated import Work

IN_ONE = "Schedule1F1B"
IN_TURN = ("ScheduleLoopedBFS", "ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble")
VEE = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
PREFIX = "torch "


def can_run(schedule: str, num_ranks: int, num_microbatches: int) -> bool:
    """Tell whether torch takes so many micro-batches: fewer than stages it mostly does not."""
    num_stages = num_ranks * (1 if schedule == IN_ONE else 2)
    return num_microbatches >= num_stages or schedule == "ScheduleZBVZeroBubble"


def names(num_ranks: int, num_microbatches: int) -> tuple[str, ...]:
    """Name what can be run."""
    every = (IN_ONE, *IN_TURN, *VEE)
    return tuple(PREFIX + name for name in every if can_run(name, num_ranks, num_microbatches))


def prepare(rank: int, work: Work, counts: tuple[int, ...]) -> dict[Key, Part]:
    """Make the schedules of every number of micro-batches."""
    dist.init_process_group("gloo")
    return {
        (name, count): _part(name.removeprefix(PREFIX), count, rank, work)
        for count in counts
        for name in names(work.num_ranks, count)
    }


def _part(schedule: str, num_microbatches: int, rank: int, work: Work) -> Part:
    from torch.distributed import pipelining

    forth = tuple(range(work.num_ranks))
    again = () if schedule == IN_ONE else forth[::-1] if schedule in VEE else forth
    ranks = forth + again
    layers, size = list(work.model()), work.num_layers // len(ranks)
    mine = {
        stage: nn.Sequential(*layers[stage * size : (stage + 1) * size])
        for stage, its_rank in enumerate(ranks)
        if its_rank == rank
    }
    stages = [
        pipelining.PipelineStage(module, stage, len(ranks), torch.device("cpu"))
        for stage, module in mine.items()
    ]
    run: Any = getattr(pipelining, schedule)(
        stages if len(stages) > 1 else stages[0], num_microbatches, loss_fn=mse_loss
    )
    inputs, targets = work.data(num_microbatches)

    def run_step() -> None:
        for module in mine.values():
            module.zero_grad()
        given: Any = {"target": targets, "losses": []} if len(ranks) - 1 in mine else {}
        run.step(*([inputs] if 0 in mine else []), return_outputs=False, **given)

    own = {
        stage * size + place: layer
        for stage, module in mine.items()
        for place, layer in enumerate(module)
    }
    return Part(run_step, own)
