"""Cut a mini-batch into micro-batches, weigh their losses, put their outputs together again."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.errors import BatchError, BoundaryError
from penstock.model.output_loss import loss_in
from penstock.model.pytree import flatten, unflatten
from penstock.types import Reduction

WeightFunction = Callable[[Any], Any]


def batch_size(value: Any, what: str) -> int:
    """Give N, the common size of dimension 0 of all tensors in `value`.

    Raises:
        BatchError: there is no tensor, one has no dimensions, sizes differ, or N is 0.
    """
    leaves, _ = flatten(value)
    if not leaves:
        raise BatchError(
            f"{what} hold no tensor, so there is no batch to cut; got {type(value).__name__}"
        )
    for leaf in leaves:
        if leaf.dim() == 0:
            raise BatchError(
                f"{what} hold a tensor without dimensions; dimension 0 of every tensor must be "
                "the batch. Pass it as a Python number, or expand it to the batch"
            )
    sizes = sorted({leaf.shape[0] for leaf in leaves})
    if len(sizes) > 1:
        raise BatchError(
            f"tensors in the {what} have different batch sizes {sizes} in dimension 0"
        )
    if sizes[0] == 0:
        raise BatchError(
            f"the {what} are an empty batch (shape {tuple(leaves[0].shape)}); give at least one "
            "sample"
        )
    return sizes[0]


def microbatch_sizes(num_samples: int, num_microbatches: int) -> list[int]:
    """Cut N samples into M sizes that differ by at most 1, larger first; N < M gives N ones."""
    count = min(num_samples, num_microbatches)
    share, rest = divmod(num_samples, count)
    return [share + 1] * rest + [share] * (count - rest)


def split(value: Any, sizes: Sequence[int]) -> list[Any]:
    """Cut every tensor along dimension 0 into views of the given sizes; repeat everything else.

    The views are detached but remember whether their tensor requires grad.
    """
    leaves, structure = flatten(value)
    if not leaves:
        return [value] * len(sizes)
    pieces = [_split_tensor(leaf, sizes) for leaf in leaves]
    return [unflatten(structure, list(row)) for row in zip(*pieces, strict=True)]


def first_microbatch(value: Any, num_microbatches: int) -> Any:
    """Give the first micro-batch of a mini-batch; None of None."""
    if value is None:
        return None
    return split(value, microbatch_sizes(batch_size(value, "inputs"), num_microbatches))[0]


def _split_tensor(tensor: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    parts = list(tensor.detach().split(list(sizes)))
    return [part.requires_grad_() for part in parts] if tensor.requires_grad else parts


def gather(parts: Sequence[Any], sizes: Sequence[int], weights: Callable[[], list[float]]) -> Any:
    """Concatenate the micro-batches' outputs along dimension 0.

    A loss that the model computed itself is the sum of the parts' losses by their `weights`.

    Raises:
        BoundaryError: a tensor's dimension 0 is not its micro-batch's size, or the parts differ in
            structure or in a value that is no tensor.
    """
    flat = [flatten(part) for part in parts]
    loss = loss_in(parts[0])
    losses = [n for n, leaf in enumerate(flat[0][0]) if leaf is loss]
    for i, (leaves, _) in enumerate(flat):
        if len(leaves) != len(flat[0][0]):
            raise BoundaryError(
                f"micro-batch {i} gave {len(leaves)} tensors, micro-batch 0 gave "
                f"{len(flat[0][0])}; outputs must have the same structure for every micro-batch"
            )
        for n, leaf in enumerate(leaves):
            if n not in losses and (leaf.dim() == 0 or leaf.shape[0] != sizes[i]):
                raise BoundaryError(
                    f"the model's output for micro-batch {i} ({sizes[i]} samples) has a tensor of "
                    f"shape {tuple(leaf.shape)}: dimension 0 must be the batch, or the outputs of "
                    "the micro-batches cannot be put together. Return one value per sample, or "
                    "use train_step with loss="
                )
    rows = list(zip(*(leaves for leaves, _ in flat), strict=True))
    for row in rows:
        if any(leaf.shape[1:] != row[0].shape[1:] for leaf in row):
            raise BoundaryError(
                f"the model's outputs for the micro-batches have tensors of shapes "
                f"{', '.join(str(tuple(leaf.shape)) for leaf in row)}, which cannot be put "
                "together along dimension 0. Return one row per sample, or use train_step with "
                "loss="
            )
    whole = [
        _weighted(row, weights()) if n in losses else torch.cat(row) if len(row) > 1 else row[0]
        for n, row in enumerate(rows)
    ]
    return unflatten(flat[0][1], whole)


def _weighted(losses: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Add up losses; one without weight may be the mean over nothing, 0/0, and has no part."""
    terms = [loss * weight for loss, weight in zip(losses, weights, strict=True) if weight != 0]
    return sum(terms[1:], start=terms[0])


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
