"""The rows of alpa_gpt.tsv: TFLOPS per device that four systems reached, and predicted ones.

Each system is the planner restricted to what the system can plan (`benchmarks.alpa_paper`).  All
its plans recompute layer by layer, as those of the rows do.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from benchmarks.alpa_paper.baselines import BASELINES, step_s
from benchmarks.alpa_paper.subjects import ALPAS, GPT, Subject, subjects
from penstock.errors import PlanError
from penstock.planner.make_plan import choose_on_meshes
from penstock.planner.mesh_task import MeshTask
from penstock.planner.submeshes import MemoryPolicy
from penstock.types import Recompute

from .gpt_of_2021 import STATE_OF_ALPA, STATE_OF_MEGATRON, XLA_MEMORY, AsItRan
from .layouts import rows_of

FILE = Path(__file__).with_name("alpa_gpt.tsv")
_BASELINE = {"Megatron-LM": "megatron", "intra-op only": "intra", "inter-op only": "inter"}
"""The baseline of a system; Alpa itself is the planner without restrictions."""
_RECOMPUTING = [MemoryPolicy(Recompute.LAYERS)]
"""Recompute each layer: a last stage that recomputes whole would recompute nothing in 1F1B."""


@dataclass(frozen=True)
class Row:
    """The rate that a system reached on a number of devices."""

    devices: int
    system: str
    measured_tflops: float

    @property
    def subject(self) -> Subject:
        """The GPT that was trained on so many devices."""
        return next(own for own in subjects((GPT,), AsItRan) if own.num_devices == self.devices)

    def predicted_tflops(self) -> float | None:
        """Return TFLOPS per device of the fastest plan; None if no plan fits."""
        task, steps = _task(self.subject, self.system), []
        for restricted in self._restricted(task):
            with suppress(PlanError):
                choice = choose_on_meshes(replace(restricted, policies=_RECOMPUTING))
                steps.append(step_s(choice.plan))
        number = self.subject.num_microbatches
        flops = self.subject.flops(task.graph_of(number), number)
        return flops / min(steps) / self.devices / 1e12 if steps else None

    def _restricted(self, task: MeshTask) -> Iterator[MeshTask]:
        name = _BASELINE.get(self.system)
        yield from [task] if name is None else BASELINES[name](task)


def rows() -> Iterator[Row]:
    """Yield the rows of the table."""
    for row in rows_of(FILE):
        yield Row(int(row["devices"]), row["system"], float(row["TFLOPS per device"]))


@cache
def _task(subject: Subject, system: str) -> MeshTask:
    task = subject.task(ALPAS)
    if system == "Megatron-LM":
        return replace(task, num_microbatches=subject.num_microbatches, state=STATE_OF_MEGATRON)
    devices = {
        kind: replace(own, memory_bytes=int(own.memory_bytes * XLA_MEMORY))
        for kind, own in task.cluster.devices.items()
    }
    cluster = replace(task.cluster, devices=devices)
    return replace(
        task, num_microbatches=subject.num_microbatches, state=STATE_OF_ALPA, cluster=cluster
    )
