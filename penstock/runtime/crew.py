"""Who takes part in a step, and what they must agree on before it begins and share when it ends.

alone      this process runs all stages; there is nothing to agree on
together   each process runs one rank's stages: a few numbers go round before and after every step
"""

import time
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.errors import BatchError
from penstock.mesh import Mesh
from penstock.model.batch import batch_size, check_values, split
from penstock.model.pytree import flatten, from_template, template, unflatten
from penstock.transport.wire import TensorKind, fill, room_for, to_bytes
from penstock.types import Reduction

from .handshake import (
    Call,
    Said,
    check_same_call,
    num_samples,
    strength,
    strongest_trace,
)
from .microbatches import (
    Batch,
    loss_weights,
    microbatch_sizes,
    raw_weights,
    shares,
)
from .replicas import Replicas
from .run import Run
from .shared_trace import Noted, clock_name, put_together

_LOSS_TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class Crew(ABC):
    """What a pipeline asks of those who run it; `readers` are the stages that read the inputs.

    `number` is the pipeline's among those of the mesh.
    """

    readers: tuple[int, ...] = (0,)
    number: int = 0

    @abstractmethod
    def runs(self, stage: int) -> bool:
        """Tell whether this process runs `stage`."""

    @abstractmethod
    def cut(self, inputs: Any, targets: Any, call: Call) -> Batch:
        """Cut a batch into micro-batches, all processes alike.

        Raises:
            BatchError: inputs and targets do not fit together, or are missing where needed.
            MeshError: the processes do not ask for the same.
        """

    @abstractmethod
    def loss(self, run: Run) -> Tensor:
        """Add up the micro-batches' losses, to the same sum on every process."""

    @abstractmethod
    def outputs(self, outputs: Any) -> Any:
        """Give the last stage's outputs on every process."""

    def noted(self, run: Run) -> Noted:
        """Give what a traced run noted on all stages of this replica."""
        return Noted(None, 0.0, run.recorded.times_s, run.recorded.sent_bytes, run.recorded.memory)

    def reporting(self) -> AbstractContextManager[None]:
        """Tell the others of whatever is raised inside."""
        return nullcontext()

    @property
    def replicas(self) -> Replicas | None:
        """The other replicas of the stages that run here; None if there are none."""
        return None

    def rank_of(self, stage: int) -> int:
        """Give the process that runs `stage` of this process's replica."""
        return 0

    @property
    def is_several(self) -> bool:
        """Whether other processes take part."""
        return False


class Alone(Crew):
    """This process runs all stages."""

    def runs(self, stage: int) -> bool:
        return True

    def cut(self, inputs: Any, targets: Any, call: Call) -> Batch:
        num_inputs = batch_size(inputs, "inputs")
        check_values(inputs, "inputs")
        if targets is not None:
            num_targets = batch_size(targets, "targets")
            if num_targets != num_inputs:
                raise _unequal(num_inputs, num_targets)
        sizes = microbatch_sizes(num_inputs, call.num_microbatches)
        parts = split(targets, sizes)
        cut = split(inputs, sizes)
        weighed = cut if targets is None else parts
        weights = loss_weights(call.reduction, weighed, sizes) if call.trains else []
        return Batch(sizes, cut, parts, weights, 0, call.trace, call.reduction)

    def loss(self, run: Run) -> Tensor:
        return _sum(run)

    def outputs(self, outputs: Any) -> Any:
        return outputs


class Together(Crew):
    """Each process runs the stages of one rank of one replica; `ranks[stage]` says whose."""

    def __init__(self, mesh: Mesh, ranks: tuple[int, ...], *, pools_statistics: bool) -> None:
        assert mesh.background is not None
        self._mesh, self._background, self._ranks = mesh, mesh.background, ranks
        self._replicas: Replicas | None = None
        if mesh.num_replicas > 1:
            self._replicas = Replicas(mesh, pools_statistics=pools_statistics)
        self._calls = 0
        self._agreed_s = 0.0

    @property
    def replicas(self) -> Replicas | None:
        return self._replicas

    @property
    def is_several(self) -> bool:
        return True

    def reporting(self) -> AbstractContextManager[None]:
        self._mesh.name_stages(self._ranks)  # another pipeline may have dealt them out otherwise
        return self._background.watch.reporting()

    def runs(self, stage: int) -> bool:
        return self._ranks[stage] == self._mesh.stage

    def rank_of(self, stage: int) -> int:
        return self._mesh.rank_of(self._ranks[stage])

    @property
    def _is_last(self) -> bool:
        """Whether the last stage runs here, and so the loss."""
        return self.runs(len(self._ranks) - 1)

    def cut(self, inputs: Any, targets: Any, call: Call) -> Batch:
        self._calls += 1
        everyone = self._exchange(
            "train_step" if call.trains else "eval_step",
            Said(
                number=float(self._calls),
                num_inputs=-1.0 if inputs is None else float(batch_size(inputs, "inputs")),
                num_targets=-1.0 if targets is None else float(batch_size(targets, "targets")),
                raw_total=self._raw_total(inputs if targets is None else targets, call),
                loss_scale=call.loss_scale,
                trace=strength(call.trace),
            ),
        )
        check_same_call(everyone)
        mesh, wanted = self._mesh, call.num_microbatches
        readers = [self._ranks[stage] for stage in self.readers]
        counts = [num_samples(everyone, r, self._ranks, readers) for r in range(mesh.num_replicas)]
        sizes = microbatch_sizes(counts[mesh.replica], wanted)
        cut, parts = _cut(inputs, sizes), _cut(targets, sizes)
        weights: list[float] = []
        if call.trains and self._is_last:
            known = call.reduction is Reduction.MEAN
            total = float(sum(counts)) if known else sum(said.raw_total for said in everyone)
            weighed = cut if targets is None else parts
            weights = shares(call.reduction, raw_weights(call.reduction, weighed, sizes), total)
        return Batch(
            sizes,
            cut,
            parts,
            weights,
            sum(min(n, wanted) for n in counts[: mesh.replica]),
            strongest_trace(everyone),
            call.reduction,
        )

    def _raw_total(self, weighed: Any, call: Call) -> float:
        if not call.trains or isinstance(call.reduction, Reduction) or not self._is_last:
            return 0.0
        if weighed is None:
            raise BatchError(
                f"rank {self._mesh.rank} computes the loss, which the reduction function weighs "
                "by the batch, and was given none of it; give targets or inputs there too"
            )
        sizes = microbatch_sizes(batch_size(weighed, "targets"), call.num_microbatches)
        return sum(raw_weights(call.reduction, split(weighed, sizes), sizes))

    def _exchange(self, kind: str, mine: Said) -> list[Said]:
        rows = self._mesh.exchange(kind, self.number, mine)
        self._agreed_s = time.perf_counter()
        return [Said(*row) for row in rows]

    def noted(self, run: Run) -> Noted:
        mine = Noted(
            clock_name(),
            self._agreed_s,
            run.recorded.times_s,
            run.recorded.sent_bytes,
            run.recorded.memory,
        )
        parts: list[Any] = [None] * self._mesh.num_stages
        group = self._mesh.group("stage")
        self._background.run(
            lambda: dist.all_gather_object(parts, mine, group=group),
            "for what the other stages traced",
        )
        return put_together(parts, mine)

    def loss(self, run: Run) -> Tensor:
        values_and_counts = torch.zeros(2, len(_LOSS_TYPES), dtype=torch.float64)
        if self._is_last:
            mine = _sum(run)
            values_and_counts[:, _LOSS_TYPES.index(mine.dtype)] = torch.stack(
                [mine.double().cpu(), torch.ones((), dtype=torch.float64)]
            )
        self._background.run(
            lambda: dist.all_reduce(values_and_counts), "for the loss of the mini-batch"
        )
        values, counts = values_and_counts
        loss: Tensor = values.sum().to(_LOSS_TYPES[int(counts.argmax())])
        return loss

    def outputs(self, outputs: Any) -> Any:
        last = self.rank_of(len(self._ranks) - 1)
        leaves, structure = flatten(outputs) if self._is_last else ([], None)
        facts: list[Any] = [None]
        if structure is not None:
            facts = [([TensorKind.of(leaf) for leaf in leaves], template(structure))]
        group = self._mesh.group("stage")
        what = "for the outputs of the last stage"
        self._background.run(
            lambda: dist.broadcast_object_list(facts, src=last, group=group), what
        )
        kinds, form = facts[0]
        found = []
        for n, kind in enumerate(kinds):
            device = self._mesh.device or torch.device("cpu")
            received, tensor = room_for(kind, device)
            if self._is_last:
                received = to_bytes(leaves[n], kind)
            if kind.num_bytes:
                self._background.run(
                    partial(dist.broadcast, received, src=last, group=group), what
                )
            found.append(leaves[n] if self._is_last else fill(tensor, received, kind))
        return unflatten(from_template(form), found)


def _cut(value: Any, sizes: list[int]) -> list[Any]:
    return [None] * len(sizes) if value is None else split(value, sizes)


def _unequal(num_inputs: int, num_targets: int) -> BatchError:
    return BatchError(
        f"inputs hold {num_inputs} samples, targets {num_targets}; dimension 0 of tensors is the "
        "batch, and lists have one entry per sample"
    )


def _sum(run: Run) -> Tensor:
    total = run.losses[0]
    for i in range(1, run.num_microbatches):
        total = total + run.losses[i]
    return total
