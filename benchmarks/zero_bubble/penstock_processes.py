"""Penstock on emulated devices: one process a rank."""

from collections.abc import Mapping
from functools import partial

from torch import nn
from torch.nn.functional import mse_loss

from benchmarks.throughput.contestants import WAYS as EVERY_WAY
from benchmarks.throughput.contestants import Way
from benchmarks.throughput.processes import Key, Part, Processes
from benchmarks.traced_costs import WHOLE_AND_DIVIDED, traced_costs
from benchmarks.zero_bubble.emulated import Work
from penstock import Mesh, Pipeline, Recompute, init_mesh, schedules
from penstock.schedules import Family
from penstock.schedules.costs import Costs
from penstock.simulator import simulate

PREFIX = "Penstock "
IN_TURN = schedules.interleaved_1f1b(stages_per_rank=2)
WAYS = {
    **{PREFIX + name: way for name, way in EVERY_WAY.items() if name != "gpipe"},
    "Penstock searched, in turn": Way(lambda costs: schedules.searched(costs, like=IN_TURN), 2),
    "Penstock searched, one stage a rank": Way(schedules.searched),
}


TRACED = "Penstock, traced"
"""What measures the costs of so many stages on each rank; it is no contestant."""
TRACED_MICROBATCHES = 8


def predicted_s(name: str, work: Work, num_microbatches: int, costs: Mapping[int, Costs]) -> float:
    """Simulate a step for the costs of so many stages on each rank."""
    way = WAYS[name]
    num_stages = work.num_ranks * way.stages_per_rank
    schedule = way.family(work.costs(num_stages))(num_stages, num_microbatches)
    return float(simulate(schedule, costs[way.stages_per_rank]).step_s)


def costs(processes: Processes) -> dict[int, Costs]:
    """Measure the costs of one stage on each rank, and of two."""
    return {per_rank: processes.results((TRACED, per_rank))[0] for per_rank in WHOLE_AND_DIVIDED}


def prepare(rank: int, work: Work, counts: tuple[int, ...]) -> dict[Key, Part]:
    """Make a pipeline for each schedule and number of micro-batches, and those to be traced."""
    mesh = init_mesh(num_stages=work.num_ranks, device="cpu")
    found = {
        (name, count): _contestant(way, count, mesh, work)
        for name, way in WAYS.items()
        for count in counts
    }
    for per_rank, families in WHOLE_AND_DIVIDED.items():
        whole, divided = (
            _pipeline(_layers(work), family, per_rank, TRACED_MICROBATCHES, mesh, trace=True)
            for family in families
        )
        data = work.data(TRACED_MICROBATCHES)
        found[TRACED, per_rank] = Part(partial(traced_costs, whole, divided, data), {})
    return found


def _contestant(way: Way, num_microbatches: int, mesh: Mesh, work: Work) -> Part:
    layers, per_rank = _layers(work), way.stages_per_rank
    family = way.family(work.costs(work.num_ranks * per_rank))
    pipe = _pipeline(layers, family, per_rank, num_microbatches, mesh)
    inputs, targets = work.data(num_microbatches)

    def run_step() -> None:
        pipe.zero_grad()
        pipe.train_step(inputs, targets)

    return Part(run_step, dict(enumerate(layers)))


def _layers(work: Work) -> list[nn.Module]:
    return list(work.model())


def _pipeline(
    layers: list[nn.Module],
    schedule: Family,
    per_rank: int,
    num_microbatches: int,
    mesh: Mesh,
    *,
    trace: bool = False,
) -> Pipeline:
    num_stages = mesh.num_stages * per_rank
    return Pipeline(
        layers,
        mesh=mesh,
        partition=[len(layers) // num_stages] * num_stages,
        num_microbatches=num_microbatches,
        loss=mse_loss,
        schedule=schedule,
        recompute=Recompute.NEVER,
        threads_per_stage=1,
        trace=trace,
    )
