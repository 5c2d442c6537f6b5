"""Where a pipeline's layers are cut: as given, by parameter counts, or by measured time."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import torch.distributed as dist

from penstock.costs.measure import measure_layers
from penstock.mesh import Mesh
from penstock.mesh.agreement import require_same
from penstock.model.layers import Layers
from penstock.planner.partition import balance_spans
from penstock.runtime.engine import Execution
from penstock.schedules import ir
from penstock.schedules.passes import add_recompute
from penstock.trace.progress import saying
from penstock.types import Recompute

_BY_COUNTS = "balanced by parameter counts"


class Cut:
    """The partition of `layers`, and how it was found."""

    def __init__(
        self,
        layers: Layers,
        num_stages: int,
        partition: Sequence[int] | None,
        num_microbatches: int,
        how: Execution,
    ) -> None:
        self._layers, self._num_microbatches, self._how = layers, num_microbatches, how
        self._can_improve = partition is None and num_stages > 1
        counts = layers.parameter_counts()
        self.partition = tuple(partition or balance_spans([counts] * num_stages, layers.spans))
        self.how = "as given" if partition is not None else ""
        if self._can_improve:
            self.how = f"{_BY_COUNTS}, until the first batch is measured"

    def measure(self, part: Any) -> bool:
        """Balance by the measured time of one micro-batch, the first time that one is at hand.

        A layer costs a stage its backward, and its forward as often as the schedule runs that:
        a stage whose backward follows at once recomputes nothing, and has time for more layers.

        Returns:
            Whether the partition is another one now.
        """
        if not self._can_improve or part is None:
            return False
        self._can_improve = False
        with saying(f"measuring the layers, to balance {len(self.partition)} stages"):
            times = measure_layers(self._layers, part, self._how.num_threads)
        before = self.partition
        costs_s = [
            [forwards * forward_s + backward_s for forward_s, backward_s in times]
            for forwards in self._forwards(len(before))
        ]
        self.partition = balance_spans(costs_s, self._layers.spans)
        rows = zip(costs_s, _rows(self.partition), strict=True)
        stage_s = [sum(on_stage[i] for i in row) for on_stage, row in rows]
        self.how = (
            f"balanced by measured time: slowest stage {max(stage_s) * 1e3:.3g} ms a micro-batch, "
            f"{max(stage_s) * len(stage_s) / sum(stage_s):.2f} times the mean"
        )
        return self.partition != before

    def _forwards(self, num_stages: int) -> list[float]:
        """Say how often each stage runs a micro-batch forward, recomputed ones included."""
        schedule = self._how.schedule(num_stages, self._num_microbatches)
        if self._how.recompute is Recompute.STAGE:
            schedule = add_recompute(schedule)
        programs = chain.from_iterable(schedule.programs)
        stages = Counter(i.stage for i in programs if isinstance(i, ir.Forward | ir.Recompute))
        return [stages[stage] / self._num_microbatches for stage in range(num_stages)]

    def settle(self, mesh: Mesh, part: Any) -> int:
        """Decide for all processes of a mesh, for good: each then keeps its own layers only.

        Rank 0 measures if it has a micro-batch and layers with values.

        Returns:
            The pipeline's number on the mesh: how many were made there before it.

        Raises:
            ConfigError: the processes make different pipelines, or in another order.
        """
        counts = self._layers.parameter_counts()
        shapes = [[tuple(p.shape) for p in step.module.parameters()] for step in self._layers]
        same = {
            "number of pipelines made before": len(mesh.pipelines),
            "layers": [(step.name, type(step.module).__name__) for step in self._layers],
            "parameters": counts,
            "shapes of parameters": shapes,
            "partition": self.partition,
            "num_microbatches": self._num_microbatches,
            "seed": self._how.seed,
            "how": self._how.choices,
        }
        assert mesh.background is not None
        mesh.background.run(
            lambda: require_same("Pipeline", same), "for the others to make the same pipeline"
        )
        modules = [step.module for step in self._layers]
        tensors = chain.from_iterable(chain(m.parameters(), m.buffers()) for m in modules)
        if mesh.is_first_rank and not any(t.is_meta for t in tensors):
            self.measure(part)
        if self._can_improve:
            self.how = _BY_COUNTS
        self._can_improve = False
        decided: list[Any] = [self.partition, self.how]
        mesh.background.run(
            lambda: dist.broadcast_object_list(decided, src=0), "for the partition of the layers"
        )
        self.partition, self.how = decided
        return mesh.number_pipeline(f"{len(counts)} layers, {sum(counts):,} parameters")


def _rows(partition: Sequence[int]) -> Iterator[range]:
    start = 0
    for count in partition:
        yield range(start, start + count)
        start += count
