"""Cut a mini-batch into micro-batches, and weigh their losses."""

from collections.abc import Callable, Sequence
from typing import Any

from penstock.errors import BatchError
from penstock.model.batch import batch_size, split
from penstock.types import Reduction

WeightFunction = Callable[[Any], Any]


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
