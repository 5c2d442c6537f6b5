"""Cut a mini-batch into micro-batches, and weigh their losses."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from penstock.errors import BatchError, ConfigError
from penstock.model.batch import batch_size, split
from penstock.model.pytree import flatten
from penstock.types import Reduction, Trace

WeightFunction = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Batch:
    """A mini-batch cut into micro-batches, as one process sees it.

    `first` is the number of this replica's first micro-batch among those of all replicas, `trace`
    what all processes record; `reduction` is how a model reduces a loss that it computes itself.
    """

    sizes: list[int]
    inputs: list[Any]
    targets: list[Any]
    weights: list[float]
    first: int = 0
    trace: Trace = Trace.OFF
    reduction: Reduction | WeightFunction = Reduction.MEAN

    def output_weights(self) -> list[float]:
        """Weigh the micro-batches' losses where the model has computed them.

        Raises:
            BatchError: the reduction function weighs by the batch, which is not here.
        """
        if not isinstance(self.reduction, Reduction) and self.inputs[0] is None:
            raise BatchError(
                "the model's loss is weighed by the batch (reduction=), which this process was "
                "not given; give inputs on the last stage's process as well"
            )
        return loss_weights(self.reduction, self.inputs, self.sizes)


def microbatch_sizes(num_samples: int, num_microbatches: int) -> list[int]:
    """Cut N samples into M sizes that differ by at most 1, larger first; N < M gives N ones."""
    count = min(num_samples, num_microbatches)
    share, rest = divmod(num_samples, count)
    return [share + 1] * rest + [share] * (count - rest)


def first_microbatch(value: Any, num_microbatches: int) -> Any:
    """Give the first micro-batch of a mini-batch; None of None."""
    if value is None:
        return None
    return split(value, microbatch_sizes(batch_size(value, "inputs"), num_microbatches))[0]


def loss_weights(
    reduction: Reduction | WeightFunction, targets: Sequence[Any], sizes: Sequence[int]
) -> list[float]:
    """Weigh each micro-batch's loss so that the weighted losses sum to the mini-batch's loss.

    MEAN: n_i / N.  SUM: 1.  A function of the target (such as its number of real tokens): w_i /
    sum w.

    Raises:
        BatchError: a weight is negative or not a number, or all are zero.
    """
    raw = raw_weights(reduction, targets, sizes)
    return shares(reduction, raw, sum(raw))


def raw_weights(
    reduction: Reduction | WeightFunction, targets: Sequence[Any], sizes: Sequence[int]
) -> list[float]:
    """Give what each micro-batch weighs before the weights are divided by their sum.

    Raises:
        BatchError: a weight is negative or not a number.
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


def shares(
    reduction: Reduction | WeightFunction, raw: Sequence[float], total: float
) -> list[float]:
    """Divide raw weights by the sum of all, those of other replicas included; SUM divides nothing.

    Raises:
        BatchError: all weights are zero.
    """
    if reduction is Reduction.SUM:
        return list(raw)
    if total == 0:
        raise BatchError(
            f"the reduction function gave the micro-batches the weights {list(raw)}; they must "
            "be non-negative numbers, not all zero (is there a real token in the batch?)"
        )
    return [weight / total for weight in raw]


def check_targets(targets: Any) -> None:
    """Refuse targets that a loss would have to send gradients to.

    Raises:
        ConfigError: a tensor in them requires grad.
    """
    for leaf in flatten(targets)[0]:
        if leaf.requires_grad:
            raise ConfigError(
                f"a target of shape {tuple(leaf.shape)} requires grad; train_step computes no "
                "gradients of targets. Give target.detach(), or pass it with the inputs"
            )


def check_loss_scale(loss_scale: Any) -> float:
    """Return `loss_scale` as a float, if gradients can be divided by it again.

    Raises:
        ConfigError: it is no number, not above 0, or not finite.
    """
    if not isinstance(loss_scale, Real) or not 0 < float(loss_scale) < math.inf:
        raise ConfigError(
            f"loss_scale={loss_scale!r}; it must be a finite number above 0, such as "
            "GradScaler.get_scale() gives"
        )
    return float(loss_scale)
