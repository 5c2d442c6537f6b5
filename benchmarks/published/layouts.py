"""Published rows: how they are read, their layouts, and the steps that are predicted."""

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import penstock
from penstock.costs.cluster import Cluster
from penstock.planner.mesh_plans import meshes_of


class Layout(NamedTuple):
    """Numbers of devices along tensor, pipeline, data and context, and stages on a rank of the
    pipeline.
    """

    tensor: int
    pipeline: int
    interleaved: int
    data: int
    context: int = 1

    @property
    def on_rank(self) -> int:
        """Devices of a rank of the pipeline."""
        return self.tensor * self.data * self.context

    def parallelism(self, num_microbatches: int, *, recomputes: bool) -> penstock.Parallelism:
        """Return the layout as Megatron-LM runs it: sequence parallel, a sharded optimizer."""
        return penstock.Parallelism(
            tensor=self.tensor,
            data=self.data,
            context=self.context,
            pipeline=self.pipeline,
            virtual=self.interleaved,
            num_microbatches=num_microbatches,
            sequence=self.tensor > 1,
            zero=1 if self.data * self.context > 1 else 0,
            recompute="stage" if recomputes else "never",
        )

    def passes_hosts(self, cluster: Cluster) -> bool:
        """Tell if the devices of some rank of the pipeline are on several hosts."""
        meshes = meshes_of(self.parallelism(1, recomputes=False), cluster, self.data)
        return any(mesh.num_hosts > 1 for mesh in meshes)


def rows_of(table: Path) -> Iterator[dict[str, str]]:
    """Yield the rows of a table, which stands below lines with its source."""
    with table.open(newline="") as file:
        lines = (line for line in file if not line.startswith("#"))
        yield from csv.DictReader(lines, delimiter="\t")


def step_s(
    profile: penstock.Profile, cluster: Cluster, parallelism: penstock.Parallelism
) -> float:
    """Return the predicted seconds of a layout's step."""
    plan = penstock.plan(profile, cluster, parallelism=parallelism)
    assert plan.predicted_step_s is not None, "it was planned"
    return plan.predicted_step_s
