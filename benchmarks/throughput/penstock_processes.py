"""Penstock with one process a stage, as under torchrun; or two stages a process, interleaved."""

from torch.nn.functional import mse_loss

from benchmarks.throughput.contestants import NUM_STAGES, WAYS, Work
from benchmarks.throughput.processes import Key, Part
from penstock import Mesh, Pipeline, Recompute, init_mesh

_WAYS = {f"Penstock {name}, processes": way for name, way in WAYS.items()}
NAMES = tuple(_WAYS)


def prepare(rank: int, work: Work, counts: tuple[int, ...]) -> dict[Key, Part]:
    """Make a pipeline for each schedule and number of micro-batches."""
    mesh = init_mesh(num_stages=NUM_STAGES, device="cpu")
    return {(name, count): _part(name, count, mesh, work) for name in NAMES for count in counts}


def _part(name: str, num_microbatches: int, mesh: Mesh, work: Work) -> Part:
    layers, way = dict(enumerate(work.model())), _WAYS[name]
    pipe = Pipeline(
        list(layers.values()),
        mesh=mesh,
        partition=work.cut(way.stages_per_rank),
        num_microbatches=num_microbatches,
        loss=mse_loss,
        schedule=way.schedule(work, num_microbatches),
        recompute=Recompute.NEVER,
        threads_per_stage=1,
    )
    inputs, targets = work.data()

    def run_step() -> None:
        pipe.zero_grad()
        pipe.train_step(inputs, targets)

    return Part(run_step, layers)
