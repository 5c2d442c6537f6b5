"""Penstock on emulated devices: one process a rank."""

from torch.nn.functional import mse_loss

from benchmarks.throughput.contestants import WAYS as EVERY_WAY
from benchmarks.throughput.contestants import Way
from benchmarks.throughput.processes import Key, Part
from benchmarks.zero_bubble.emulated import Work
from penstock import Mesh, Pipeline, Recompute, init_mesh, schedules
from penstock.simulator import simulate

PREFIX = "Penstock "
IN_TURN = schedules.interleaved_1f1b(stages_per_rank=2)
WAYS = {
    **{PREFIX + name: way for name, way in EVERY_WAY.items() if name != "gpipe"},
    "Penstock searched, in turn": Way(lambda costs: schedules.searched(costs, like=IN_TURN), 2),
    "Penstock searched, one stage a rank": Way(schedules.searched),
}


def foretold_s(name: str, work: Work, num_microbatches: int) -> float:
    """Simulate a step: from what the devices take, and nothing that was measured."""
    way = WAYS[name]
    num_stages = work.num_ranks * way.stages_per_rank
    costs = work.costs(num_stages)
    schedule = way.family(costs)(num_stages, num_microbatches)
    return float(simulate(schedule, costs).step_s)


def prepare(rank: int, work: Work, counts: tuple[int, ...]) -> dict[Key, Part]:
    """Make a pipeline for each schedule and number of micro-batches."""
    mesh = init_mesh(num_stages=work.num_ranks)
    return {
        (name, count): _part(way, count, mesh, work)
        for name, way in WAYS.items()
        for count in counts
    }


def _part(way: Way, num_microbatches: int, mesh: Mesh, work: Work) -> Part:
    layers, num_stages = dict(enumerate(work.model())), work.num_ranks * way.stages_per_rank
    pipe = Pipeline(
        list(layers.values()),
        mesh=mesh,
        partition=[work.num_layers // num_stages] * num_stages,
        num_microbatches=num_microbatches,
        loss=mse_loss,
        schedule=way.family(work.costs(num_stages)),
        recompute=Recompute.NEVER,
        threads_per_stage=1,
    )
    inputs, targets = work.data(num_microbatches)

    def run_step() -> None:
        pipe.zero_grad()
        pipe.train_step(inputs, targets)

    return Part(run_step, layers)
