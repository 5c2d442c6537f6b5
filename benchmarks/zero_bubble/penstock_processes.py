"""Penstock on emulated devices: one process a rank."""

from collections.abc import Callable
from dataclasses import dataclass

from torch.nn.functional import mse_loss

from benchmarks.throughput.processes import Key, Part
from benchmarks.zero_bubble.emulated import Work
from penstock import Mesh, Pipeline, Recompute, init_mesh, schedules
from penstock.schedules import Family
from penstock.schedules.costs import Costs
from penstock.simulator import simulate


@dataclass(frozen=True, slots=True)
class Way:
    """What makes a schedule of the costs of its stages, and how many of them a rank has."""

    family: Callable[[Costs], Family]
    stages_per_rank: int = 1

    def num_stages(self, work: Work) -> int:
        """Give K of all ranks."""
        return work.num_ranks * self.stages_per_rank


WAYS = {
    "one_f_one_b": Way(lambda _: schedules.one_f_one_b),
    "interleaved_1f1b": Way(lambda _: schedules.interleaved_1f1b(2), 2),
    "zb_h1": Way(schedules.zb_h1),
    "zb_h2": Way(schedules.zb_h2),
    "zb_v": Way(schedules.zb_v, 2),
    "searched": Way(lambda costs: schedules.searched(costs, like=schedules.zb_v()), 2),
}
PREFIX = "Penstock "
NAMES = tuple(PREFIX + name for name in WAYS)


def foretold_s(name: str, work: Work, num_microbatches: int) -> float:
    """Simulate a step: from what the devices take, and nothing that was measured."""
    way = WAYS[name.removeprefix(PREFIX)]
    num_stages = way.num_stages(work)
    costs = work.costs(num_stages)
    schedule = way.family(costs)(num_stages, num_microbatches)
    return float(simulate(schedule, costs).step_s)


def prepare(rank: int, work: Work, counts: tuple[int, ...]) -> dict[Key, Part]:
    """Make a pipeline for each schedule and number of micro-batches."""
    mesh = init_mesh(num_stages=work.num_ranks)
    return {
        (PREFIX + name, count): _part(way, count, mesh, work)
        for name, way in WAYS.items()
        for count in counts
    }


def _part(way: Way, num_microbatches: int, mesh: Mesh, work: Work) -> Part:
    layers, num_stages = dict(enumerate(work.model())), way.num_stages(work)
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
