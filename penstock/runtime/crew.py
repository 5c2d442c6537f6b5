"""Who takes part in a step, and what they must agree on before it begins and share when it ends.

alone      this process runs all stages; there is nothing to agree on
together   each process runs one stage: a few numbers go round before and after every step
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.errors import BatchError, MeshError
from penstock.mesh import Mesh
from penstock.model.pytree import flatten, from_template, template, unflatten
from penstock.types import Reduction

from .microbatches import (
    batch_size,
    loss_weights,
    microbatch_sizes,
    raw_weights,
    shares,
    split,
)
from .replicas import Replicas
from .run import Run
from .transport.wire import TensorKind, fill, room_for, to_bytes

Reduce = Reduction | Callable[[Any], Any]
_LOSS_TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Batch:
    """A mini-batch cut into micro-batches, as one process sees it.

    `first` is the number of this replica's first micro-batch among those of all replicas.
    """

    sizes: list[int]
    inputs: list[Any]
    targets: list[Any]
    weights: list[float]
    first: int = 0


class Crew(ABC):
    """What a pipeline asks of those who run it."""

    @abstractmethod
    def runs(self, stage: int) -> bool:
        """Tell whether this process runs `stage`."""

    @abstractmethod
    def cut(
        self, inputs: Any, targets: Any, num_microbatches: int, reduction: Reduce | None
    ) -> Batch:
        """Cut a batch into micro-batches, all processes alike; `reduction` None: without weights.

        Raises:
            BatchError: inputs and targets do not fit together, or are missing where needed.
        """

    @abstractmethod
    def loss(self, run: Run) -> Tensor:
        """Add up the micro-batches' losses, to the same sum on every process."""

    @abstractmethod
    def outputs(self, outputs: Any) -> Any:
        """Give the last stage's outputs on every process."""

    def reporting(self) -> AbstractContextManager[None]:
        """Tell the others of whatever is raised inside."""
        return nullcontext()

    @property
    def replicas(self) -> Replicas | None:
        """The other replicas of the stages that run here; None if there are none."""
        return None

    @property
    def is_several(self) -> bool:
        """Whether other processes take part."""
        return False


class Alone(Crew):
    """This process runs all stages."""

    def runs(self, stage: int) -> bool:
        return True

    def cut(
        self, inputs: Any, targets: Any, num_microbatches: int, reduction: Reduce | None
    ) -> Batch:
        num_samples = batch_size(inputs, "inputs")
        if targets is not None:
            num_targets = batch_size(targets, "targets")
            if num_targets != num_samples:
                raise _unequal(num_samples, num_targets)
        sizes = microbatch_sizes(num_samples, num_microbatches)
        parts = split(targets, sizes)
        weights = loss_weights(reduction, parts, sizes) if reduction is not None else []
        return Batch(sizes, split(inputs, sizes), parts, weights)

    def loss(self, run: Run) -> Tensor:
        return _sum(run)

    def outputs(self, outputs: Any) -> Any:
        return outputs


class Together(Crew):
    """Each process runs one stage of one replica."""

    def __init__(self, mesh: Mesh, *, pools_statistics: bool) -> None:
        assert mesh.background is not None
        self._mesh, self._background = mesh, mesh.background
        self._replicas: Replicas | None = None
        if mesh.num_replicas > 1:
            self._replicas = Replicas(mesh, pools_statistics=pools_statistics)
        self._calls = 0

    @property
    def replicas(self) -> Replicas | None:
        return self._replicas

    @property
    def is_several(self) -> bool:
        return True

    def reporting(self) -> AbstractContextManager[None]:
        return self._background.watch.reporting()

    def runs(self, stage: int) -> bool:
        return stage == self._mesh.stage

    @property
    def _is_last(self) -> bool:
        return self._mesh.stage == self._mesh.num_stages - 1

    def cut(
        self, inputs: Any, targets: Any, num_microbatches: int, reduction: Reduce | None
    ) -> Batch:
        self._calls += 1
        mine = [
            float(reduction is not None),
            float(self._calls),
            -1.0 if inputs is None else float(batch_size(inputs, "inputs")),
            -1.0 if targets is None else float(batch_size(targets, "targets")),
            self._raw_total(targets, num_microbatches, reduction),
        ]
        everyone = self._gather(mine)
        self._check_calls(everyone)
        counts = [self._num_samples(everyone, replica) for replica in range(self._num_replicas)]
        sizes = microbatch_sizes(counts[self._mesh.replica], num_microbatches)
        parts: list[Any] = [None] * len(sizes) if targets is None else split(targets, sizes)
        weights: list[float] = []
        if reduction is not None and self._is_last:
            known = reduction is Reduction.MEAN
            total = float(sum(counts)) if known else sum(row[4] for row in everyone)
            weights = shares(reduction, raw_weights(reduction, parts, sizes), total)
        return Batch(
            sizes,
            [None] * len(sizes) if inputs is None else split(inputs, sizes),
            parts,
            weights,
            sum(min(n, num_microbatches) for n in counts[: self._mesh.replica]),
        )

    @property
    def _num_replicas(self) -> int:
        return self._mesh.num_replicas

    def _raw_total(self, targets: Any, num_microbatches: int, reduction: Reduce | None) -> float:
        if isinstance(reduction, Reduction | None) or not self._is_last:
            return 0.0
        sizes = microbatch_sizes(batch_size(targets, "targets"), num_microbatches)
        return sum(raw_weights(reduction, split(targets, sizes), sizes))

    def _check_calls(self, everyone: list[list[float]]) -> None:
        for rank, (trains, calls, *_) in enumerate(everyone):
            if trains != everyone[0][0] or calls != everyone[0][1]:
                did = [
                    f"rank {r} began call {row[1]:.0f}, {'train_step' if row[0] else 'eval_step'}"
                    for r, row in ((0, everyone[0]), (rank, everyone[rank]))
                ]
                raise MeshError(
                    f"the processes do not do the same: {' and '.join(did)}. Every process must "
                    "make every call, in the same order (no `if rank == 0` around a step)"
                )

    def _num_samples(self, everyone: list[list[float]], replica: int) -> int:
        """Give N of a replica, seen alike by all processes."""
        first = replica * self._mesh.num_stages
        rows = everyone[first : first + self._mesh.num_stages]
        if rows[0][2] < 0:
            raise BatchError(
                f"rank {first} runs stage 0{self._of(replica)} and was given no inputs; give them "
                "on every rank, or at least there"
            )
        num_samples = int(rows[0][2])
        for rank, row in enumerate(rows, start=first):
            for what, number in (("inputs", row[2]), ("targets", row[3])):
                if number not in (-1.0, float(num_samples)):
                    raise BatchError(
                        f"rank {first} was given {num_samples} inputs, rank {rank} {number:.0f} "
                        f"{what}; all ranks of a replica must be given the same mini-batch"
                    )
        if rows[-1][3] < 0 and any(row[3] >= 0 for row in rows):
            raise BatchError(
                f"rank {first + len(rows) - 1} runs the last stage{self._of(replica)} and was "
                "given no targets; give them on every rank, or at least there"
            )
        return num_samples

    def _of(self, replica: int) -> str:
        return f" of replica {replica}" if self._num_replicas > 1 else ""

    def _gather(self, mine: list[float]) -> list[list[float]]:
        sent = torch.tensor(mine, dtype=torch.float64)
        rows = [torch.empty_like(sent) for _ in range(self._mesh.world_size)]
        self._background.run(
            lambda: dist.all_gather(rows, sent), "for the others to begin the same call"
        )
        return [row.tolist() for row in rows]

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
        last = self._mesh.rank_of(self._mesh.num_stages - 1)
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


def _unequal(num_inputs: int, num_targets: int) -> BatchError:
    return BatchError(
        f"inputs hold {num_inputs} samples, targets {num_targets}; dimension 0 of both is the "
        "batch"
    )


def _sum(run: Run) -> Tensor:
    total = run.losses[0]
    for i in range(1, len(run.inputs)):
        total = total + run.losses[i]
    return total
