"""Cut a mini-batch into micro-batches, alike on all processes; weigh and sum their losses."""

import copy
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from penstock.errors import BatchError, ConfigError, UncountedError
from penstock.mesh import Mesh
from penstock.mesh.same_batch import (
    NOTHING_SAID,
    BatchCheck,
    CallHeader,
    Texts,
    agreed,
    check_same,
    check_same_backward,
    check_same_call,
    num_samples,
)
from penstock.model.batch import FlatBatch, check_values, flat_batch
from penstock.model.output_loss import COUNTS, counted_in
from penstock.model.pytree import flatten
from penstock.planner.placement import Placement
from penstock.types import CheckBatches, Reduction, Trace

LossFunction = Callable[[Any, Any], Tensor]
"""(output, target) -> the loss of a micro-batch."""
Reduce = Reduction | Callable[[Any], Any]

_BY_STRENGTH = (Trace.OFF, Trace.TIME, Trace.MEMORY)


@dataclass(frozen=True, slots=True)
class Call:
    """The options of a call.

    Without `trains` the call returns outputs, and losses have no weights; if it `returns`, their
    backward comes later.  All processes must use the same options, except `trace`: all record the
    strongest one.  With `computes_loss` the model computes its loss itself.
    """

    num_microbatches: int
    reduction: Reduce
    trains: bool = False
    returns: bool = False
    loss_scale: float = 1.0
    trace: Trace = Trace.OFF
    computes_loss: bool = False

    @property
    def kind(self) -> str:
        """The name of the call, of `agreement.CALLS`."""
        if self.trains:
            return "train_step"
        return "pipe(inputs)" if self.returns else "eval_step"


@dataclass(frozen=True, slots=True)
class Batch:
    """The micro-batches of a mini-batch in one process.

    `first` is the number of this replica's first micro-batch among those of all replicas.  `trace`
    says what all processes record.  `reduction` is the reduction of a loss in the model.
    """

    sizes: list[int]
    inputs: list[Any]
    targets: list[Any]
    weights: list[float]
    first: int = 0
    trace: Trace = Trace.OFF
    reduction: Reduce = Reduction.MEAN

    def output_weights(self) -> list[float]:
        """Return the weights of losses that the model has computed.

        If all weights are 0, samples weigh instead: the loss is then the model's own 0/0.  A
        BatchError tells a process without the batch that the reduction function needs it.
        """
        if not isinstance(self.reduction, Reduction) and self.inputs[0] is None:
            raise BatchError(
                "the model's loss is weighed by the batch (reduction=), which this process was "
                "not given; give inputs on the last stage's process as well"
            )
        raw = raw_weights(self.reduction, self.inputs, self.sizes)
        if not any(raw):
            raw = [float(size) for size in self.sizes]
        return shares(self.reduction, raw, sum(raw))


class Splitter:
    """Cuts the mini-batches of one pipeline; each process sees the cuts of its own replica.

    `readers` are the stages that read the inputs.  `number` counts the pipelines of the mesh.
    `agreed_s` is the time at which this process last heard from all others.
    """

    def __init__(self, mesh: Mesh, placement: Placement) -> None:
        self._world, self._replica = mesh.world, mesh.replica
        stages, replicas = range(placement.num_stages), range(mesh.num_replicas)
        self._rank, self._counts = mesh.rank, mesh.shards.rank == 0
        self._alone, self._num_shards = mesh.world.size == 1, mesh.shards.size
        self._ranks = [[placement.ranks[stage][r] for stage in stages] for r in replicas]
        stages_here = placement.stages_of(mesh.rank)
        self._is_whole = len(stages_here) == placement.num_stages
        self._ends_here = stages[-1] in stages_here
        self.readers: tuple[int, ...] = (0,)
        self.number = 0
        self.agreed_s = 0.0
        self.call = 0
        """The number of the last call, alike on all processes."""
        self.check_batches(CheckBatches.FIRST)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Splitter":
        """Return the splitter of a copied pipeline, with a new number: all ranks copy alike."""
        other = copy.copy(self)
        other.number = self._world.number_pipeline(f"a copy of number {self.number}")
        return other

    def check_batches(self, when: CheckBatches) -> None:
        """Set when the ranks of a replica compare the values of their batches."""
        self._check = BatchCheck(when, num_shards=self._num_shards)

    def cut(self, inputs: Any, targets: Any, call: Call) -> Batch:
        """Cut a batch into micro-batches, in the same way on all processes.

        Raises:
            BatchError: inputs and targets do not fit together, or are missing where needed.
            UncountedError: the weights of all micro-batches are 0.
            MeshError: the processes make different calls.
        """
        self.call += 1
        # 1. Flatten once what this process was given, and weigh it where the loss is computed.
        stages = self._ranks[self._replica]
        reads = any(self._rank in stages[reader] for reader in self.readers)
        has_inputs = inputs is not None or self._is_whole
        flat_inputs = flat_batch(inputs, "inputs") if has_inputs else None
        if flat_inputs is not None and reads:
            check_values(flat_inputs.tensors, "inputs")
        num_inputs = None if flat_inputs is None else flat_inputs.num_samples
        flat_targets = None if targets is None else flat_batch(targets, "targets", num_inputs)
        raw = self._raw_weights(flat_targets or flat_inputs, call)

        # 2. Announce the call to all processes, and see that all make the same one.
        kind = call.kind
        flat = flat_inputs, flat_targets
        read = flat_inputs if reads else None, flat_targets if self._ends_here else None
        texts = NOTHING_SAID if self._alone else self._check.texts(kind, flat, read)
        counted = counted_in(inputs) if call.computes_loss or not call.trains else -1.0
        header = CallHeader(
            number=self.call,
            trace=_BY_STRENGTH.index(call.trace),
            num_inputs=num_inputs,
            num_targets=None if flat_targets is None else flat_targets.num_samples,
            inputs_digest=texts.digests[0],
            targets_digest=texts.digests[1],
            raw_total=sum(raw) if self._counts else 0.0,
            loss_scale=call.loss_scale,
            counted=counted if counted >= 0 else None,
        )
        headers, counts = [header], [num_inputs or 0]
        if not self._alone or header.num_targets not in (None, num_inputs):
            headers, counts = self._compared(kind, header, texts)
        self.agreed_s = time.perf_counter()

        # 3. Cut what this replica has, and weigh it among all replicas.
        reduction = _agreed_reduction(call, headers)
        replica, num_microbatches = self._replica, call.num_microbatches
        sizes = microbatch_sizes(counts[replica], num_microbatches)
        weights: list[float] = []
        if call.trains and self._ends_here:
            is_mean = reduction is Reduction.MEAN
            total = float(sum(counts)) if is_mean else sum(h.raw_total for h in headers)
            weights = shares(reduction, raw or raw_weights(reduction, (), sizes), total)
        nothing = [None] * len(sizes)
        return Batch(
            sizes,
            nothing if flat_inputs is None else flat_inputs.split(sizes),
            nothing if flat_targets is None else flat_targets.split(sizes),
            weights,
            sum(min(n, num_microbatches) for n in counts[:replica]),
            _BY_STRENGTH[max(header.trace for header in headers)],
            reduction,
        )

    @agreed()
    def _compared(
        self, kind: str, header: CallHeader, texts: Texts
    ) -> tuple[list[CallHeader], list[int]]:
        """Return the headers of all processes, and the number of samples of each replica.

        MeshError if processes make different calls, BatchError if they were given other batches.
        """
        rows = self._world.exchange(kind, self.number, header.pack())
        headers = list(map(CallHeader.unpack, rows))
        check_same_call(headers)
        counts = num_samples(headers, self._ranks, self.readers)
        replicas = [sorted({*chain.from_iterable(stages)}) for stages in self._ranks]
        digests = [(header.inputs_digest, header.targets_digest) for header in headers]
        check_same(self._world, replicas, digests, texts)
        return headers, counts

    def begin_backward(self, number: int, gradients: Sequence[Tensor | None] | None) -> None:
        """Begin the backward of call `number` on all; None: no outputs here.  Else MeshError."""
        self.call += 1
        if self._alone:
            return
        sizes = [_size_of(gradient) for gradient in gradients or ()]
        header = (float(number), float(gradients is not None), sum(sizes), float(len(sizes)))
        rows = self._world.exchange("backward() of pipe(inputs)", self.number, header)
        check_same_backward(rows, [sorted({*chain(*stages)}) for stages in self._ranks])

    def _raw_weights(self, weighed: FlatBatch | None, call: Call) -> list[float]:
        """Return the user's weights of the micro-batches, if this process computes the loss."""
        if not call.trains or isinstance(call.reduction, Reduction) or not self._ends_here:
            return []
        if weighed is None:
            raise BatchError(
                f"rank {self._rank} computes the loss, which the reduction function weighs "
                "by the batch, and was given none of it; give targets or inputs there too"
            )
        sizes = microbatch_sizes(weighed.num_samples, call.num_microbatches)
        return raw_weights(call.reduction, weighed.split(sizes), sizes)

    def loss(self, losses: Mapping[int, Tensor]) -> Tensor:
        """Sum the micro-batches' losses in their order; return the same sum on each process."""
        mine: Tensor | None = None
        for i in range(len(losses)):
            mine = losses[i] if mine is None else mine + losses[i]
        if self._alone:
            assert mine is not None
            return mine
        part = mine if self._counts else None
        return self._world.sum_scalars(part, "for the loss of the mini-batch")


def _size_of(gradient: Tensor | None) -> float:
    """Return the sum of a gradient's absolute values."""
    return 0.0 if gradient is None else float(gradient.detach().abs().sum(dtype=torch.float64))


def microbatch_sizes(num_samples: int, num_microbatches: int) -> list[int]:
    """Return M sizes that sum to N and differ by at most 1, larger first; N < M gives N ones."""
    count = min(num_samples, num_microbatches)
    share, rest = divmod(num_samples, count)
    return [share + 1] * rest + [share] * (count - rest)


def first_microbatch(value: Any, num_microbatches: int) -> Any:
    """Return the first micro-batch of a mini-batch; None of None."""
    if value is None:
        return None
    batch = flat_batch(value, "inputs")
    return batch.split(microbatch_sizes(batch.num_samples, num_microbatches))[0]


def raw_weights(reduction: Reduce, targets: Sequence[Any], sizes: Sequence[int]) -> list[float]:
    """Return the weight of each micro-batch, before division by their sum; BatchError if negative.

    MEAN       n_i / N            n_i samples of N
    SUM        1
    function   w_i / sum w        of the target, such as its number of real tokens
    """
    if reduction is Reduction.SUM:
        return [1.0] * len(sizes)
    if reduction is Reduction.MEAN:
        return [float(size) for size in sizes]
    if isinstance(reduction, Reduction):
        raise AssertionError(f"no rule for {reduction}")
    raw = [float(reduction(target)) for target in targets]
    if not all(0 <= weight < float("inf") for weight in raw):
        raise BatchError(
            f"the reduction function gave the weights {raw} for the micro-batches; they must be "
            "non-negative numbers (the count of real tokens in a target, say)"
        )
    return raw


def shares(reduction: Reduce, raw: Sequence[float], total: float) -> list[float]:
    """Divide raw weights by `total`, the sum over all replicas, above 0; SUM divides nothing."""
    return list(raw) if reduction is Reduction.SUM else [weight / total for weight in raw]


def _agreed_reduction(call: Call, headers: Sequence[CallHeader]) -> Reduce:
    """Return the reduction of losses, the same on each process.

    A BatchError refuses a function if the inputs give the divisor; an UncountedError, sums of 0.
    """
    # Some models divide by a count in their inputs: their losses then only add up.
    counted = max((h.counted for h in headers if h.counted is not None), default=None)
    if counted is None:
        is_function = not isinstance(call.reduction, Reduction)
        if is_function and call.trains and not any(header.raw_total for header in headers):
            raise UncountedError(
                "the reduction function gave all micro-batches the weight 0: their loss would be "
                "a mean over nothing (is there a real token in the batch?). Leave this batch out; "
                "the next one may follow"
            )
        return call.reduction
    names = " or ".join(map(repr, COUNTS))
    if call.computes_loss and not isinstance(call.reduction, Reduction):
        raise BatchError(
            f"the inputs have {names} ({counted:g}), by which the model divides the loss of each "
            "micro-batch, and the reduction function would weigh these once more. Leave "
            "reduction= out, or that input"
        )
    if counted == 0 and call.trains:
        raise UncountedError(
            f"the inputs have {names} = 0: the loss would be 0 / 0 (is there a real token in the "
            "batch?). Leave this batch out; the next one may follow"
        )
    return Reduction.SUM


def check_targets(targets: Any) -> None:
    """Raise ConfigError for targets that require gradients."""
    for leaf in flatten(targets)[0]:
        if leaf.requires_grad:
            raise ConfigError(
                f"a target of shape {tuple(leaf.shape)} requires grad; train_step computes no "
                "gradients of targets. Give target.detach(), or pass it with the inputs"
            )


def check_loss_scale(loss_scale: Any) -> float:
    """Return `loss_scale` as a float; ConfigError unless it is finite and above 0."""
    if not isinstance(loss_scale, Real) or not 0 < float(loss_scale) < math.inf:
        raise ConfigError(
            f"loss_scale={loss_scale!r}; it must be a finite number above 0, such as "
            "GradScaler.get_scale() gives"
        )
    return float(loss_scale)
