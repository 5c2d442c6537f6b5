"""The largest Transformer of table 1, planned for 128 cores and simulated."""

from dataclasses import dataclass

from penstock.planner.candidates import Constraints
from penstock.planner.rank import find_plans

from .cells import Cell
from .largest import cluster_of
from .models import transformer
from .published import LARGEST_TRANSFORMER

TABLE = "1, planned"
_BATCH, _GIB = 32, 2**30


@dataclass(frozen=True)
class Planned:
    """What was planned, as cells and in words."""

    cells: list[Cell]
    note: str


def planned(num_devices: int) -> Planned:
    """Plan the Transformer of so many devices: as many stages, 32 micro-batches, GPipe."""
    column = next(x for x in LARGEST_TRANSFORMER if x.num_devices == num_devices and x.is_pipeline)
    subject, cluster = transformer(*column.size), cluster_of(num_devices, "tpu-v3-8")
    constraints = Constraints(
        batch_size=_BATCH,
        num_ranks=num_devices,
        num_replicas=1,
        num_microbatches=_BATCH,
        schedules=("gpipe",),
        stages_per_rank=(1,),
    )
    best = find_plans([subject.profile((1,))], cluster, constraints).best[0]
    timeline, weights = best.predicted.timeline, subject.profile((1,)).weights
    kept = sum(timeline.peak_bytes().values()) / _GIB
    fullest = max(timeline.peak_bytes_of_ranks()) / _GIB
    has = cluster.device_of(0).memory_bytes / _GIB
    sizes = sorted(set(best.plan.partition))
    cells = [
        Cell(
            table=TABLE,
            model=subject.name,
            what="weights, GiB",
            published=column.parameter_memory,
            predicted=sum(x.total_bytes - x.buffer_bytes for x in weights) / _GIB,
        ),
        Cell(
            table=TABLE,
            model=subject.name,
            what="activations, GiB",
            published=column.activation_memory,
            predicted=kept,
            target=0.12,
        ),
        Cell(
            table=TABLE,
            model=subject.name,
            what="fullest device, GiB",
            published=None,
            predicted=fullest,
        ),
        Cell(
            table=TABLE,
            model=subject.name,
            what="seconds of a step",
            published=None,
            predicted=best.step_s,
        ),
    ]
    note = (
        f"{subject.name}, {column.parameters}{'B' if column.million > 10**6 else 'M'} parameters, "
        f"planned for {num_devices} cores: {' to '.join(map(str, sizes))} layers in a stage, all "
        f"recomputed; the fullest core holds {fullest:.1f} of its {has:.0f} GiB, and a step of "
        f"{_BATCH} samples takes {best.step_s:.1f} s, {timeline.bubble:.0%} of it bubble."
    )
    return Planned(cells, note)
