"""Gather the outputs of micro-batches into the output of the mini-batch."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.errors import BoundaryError, OutputWarning
from penstock.mesh.agreement import encode
from penstock.mesh.control import Control
from penstock.model.compare import first_difference, is_object, leaf_paths
from penstock.model.output_loss import loss_in
from penstock.model.pytree import constants, flatten, flatten_by, tree_map, unflatten
from penstock.model.templates import StandIn, from_template, template
from penstock.transport.wire import TensorKind, fill, room_for, to_bytes

_SHOWN = 60


def gather(parts: Sequence[Any], sizes: Sequence[int], weights: Callable[[], list[float]]) -> Any:
    """Concatenate the micro-batches' outputs along dimension 0.

    A loss that the model computed, and the scalars beside it, become sums weighted by `weights`.
    A value that cannot be gathered becomes a stand-in that raises when it is used.  One part alone
    is returned unchanged.

    Raises:
        BoundaryError: the parts differ in structure or in a value that is no tensor; or the output
            is one tensor, whose dimension 0 is not the micro-batch's size.
    """
    _check_alike(parts, sizes)
    flat = [flatten_by(part, is_object) for part in parts]
    first, structure = flat[0]
    for i, (leaves, _) in enumerate(flat):
        if len(leaves) != len(first):
            raise BoundaryError(
                f"micro-batch {i} gave {len(leaves)} tensors, micro-batch 0 gave "
                f"{len(first)}; outputs must have the same structure for every micro-batch"
            )

    # Join each tensor: a weighted sum for losses, a concatenation for all others.
    has_loss = loss_in(parts[0]) is not None
    paths = {id(leaf): path for path, leaf in leaf_paths(parts[0])}
    joined: list[Any] = [
        _weighted(row, weights())
        if has_loss and _is_scalar(row[0])
        else _joined(row, sizes, paths.get(id(row[0]), ""))
        for row in zip(*(leaves for leaves, _ in flat), strict=True)
    ]
    if isinstance(parts[0], Tensor) and is_unjoined(joined[0]):  # there is nothing else
        joined[0].refuse()
    return unflatten(structure, joined)


def share(stages: Control, last: int, outputs: Any, device: torch.device) -> Any:
    """Broadcast the outputs of the last stage, which process `last` runs, to all stages."""
    if stages.size == 1:
        return outputs
    # 1. Broadcast the structure, and the kinds of the tensors, from the last stage.
    purpose, is_last = "for the outputs of the last stage", stages.rank == last
    leaves, structure = flatten(_tellable(outputs)) if is_last else ([], None)
    facts = None
    if structure is not None:
        facts = ([TensorKind.of(leaf) for leaf in leaves], template(structure))
    kinds, form = stages.broadcast(facts, last, purpose)

    # 2. Broadcast the tensors as bytes.
    shared = []
    for n, kind in enumerate(kinds):
        received, tensor = room_for(kind, device)
        if is_last:
            received = to_bytes(leaves[n], kind)
        if kind.num_bytes:
            stages.tensors.broadcast(last, received, purpose)
        shared.append(leaves[n] if is_last else fill(tensor, received, kind))
    return unflatten(from_template(form), shared)


def _tellable(outputs: Any) -> Any:
    """Return outputs with a stand-in for each object that cannot be sent."""
    parts, structure = flatten_by(outputs, is_object)
    for n, part in enumerate(parts):
        if isinstance(part, Tensor):
            continue
        try:
            encode(part)
        except BoundaryError:
            parts[n] = _Absent(type(part).__name__, _ELSEWHERE)
    return unflatten(structure, parts)


def _is_scalar(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() == 0 and leaf.is_floating_point()


def _joined(row: Sequence[Any], sizes: Sequence[int], path: str) -> Any:
    """Concatenate tensors along the batch; return a stand-in for values that have none."""
    if len(row) == 1:
        return row[0]
    if not isinstance(row[0], Tensor):
        same = all(leaf is row[0] for leaf in row)
        return row[0] if same else _Absent(type(row[0]).__name__, _SEVERAL)
    shapes = [tuple(leaf.shape) for leaf in row]
    for i, shape in enumerate(shapes):
        if shape[:1] != (sizes[i],):
            return _Unjoined(
                f"for micro-batch {i} ({sizes[i]} samples) is a tensor of shape {shape}: "
                "dimension 0 must be the batch",
                path,
            )
    if len({shape[1:] for shape in shapes}) > 1:
        listed = ", ".join(map(str, shapes))
        return _Unjoined(f"is, for the micro-batches, tensors of shapes {listed}", path)
    return torch.cat(list(row))


class _Unjoined(StandIn):
    """Replaces tensors of the micro-batches that cannot be concatenated; raises when used."""

    def __init__(self, why: str, path: str) -> None:
        self.__dict__.update(why=why, path=path)

    def _error(self) -> BoundaryError:
        where = f", in output{self.path}," if self.path else ""
        return BoundaryError(
            f"the model's output{where} {self.why}, or the outputs of the micro-batches cannot be "
            "put together. Return one value per sample, do without it, give batches of one "
            "micro-batch, or use train_step with loss="
        )

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        next(filter(is_unjoined, flatten_by((args, kwargs), is_unjoined)[0])).refuse()


def is_unjoined(value: Any) -> bool:
    """Tell whether a value is the stand-in for a tensor that cannot be concatenated."""
    return isinstance(value, _Unjoined)


class _Absent(StandIn):
    """Replaces an object of a `kind` that the caller cannot get; raises with `why` when used."""

    def __init__(self, kind: str, why: str) -> None:
        self.__dict__.update(kind=kind, why=why)

    def _error(self) -> BoundaryError:
        return BoundaryError(f"the model's output holds a {self.kind}, {self.why}")


_SEVERAL = (
    "and each micro-batch gave one of its own, which cannot be put together. Return tensors "
    "with one row per sample, or switch it off (use_cache=False, say)"
)
"""The end of the message for an object that differs between micro-batches."""
_ELSEWHERE = (
    "which only the process of the last stage has. Return tensors, numbers, strings, and "
    "tuples, lists, dicts and dataclasses of them"
)
"""The end of the message for an object in the last stage's process only."""


def _check_alike(parts: Sequence[Any], sizes: Sequence[int]) -> None:
    """Raise BoundaryError for unlike constants; warn of one that may count the samples."""
    for i, part in enumerate(parts[1:], 1):
        difference = first_difference(parts[0], part)
        if difference is not None:
            path, first, other = difference
            raise BoundaryError(
                f"the model's outputs for the micro-batches cannot be put together: output{path} "
                f"is {_shown(first)} for micro-batch 0 and {_shown(other)} for micro-batch {i}. "
                "Return what belongs to the samples as a tensor with one row per sample, and the "
                "same structure for every micro-batch"
            )
    counts = [n for n in constants(flatten(parts[0])[1]) if type(n) is int and n == sizes[0]]
    if counts and len(sizes) > 1:
        warnings.warn(
            f"the model's output holds the number {counts[0]}, which is also the number of "
            f"samples in each micro-batch. If it counts them, it is not that of the whole batch "
            f"({sum(sizes)} samples): compute it from the tensors of the output",
            OutputWarning,
            stacklevel=2,
        )


def _shown(value: Any) -> str:
    text = repr(tree_map(_Shape, value))
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


@dataclass(frozen=True, slots=True)
class _Shape:
    tensor: Tensor

    def __repr__(self) -> str:
        return f"a tensor of shape {tuple(self.tensor.shape)}"


def _weighted(losses: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Sum weighted losses; skip a loss of weight 0, which may be the mean of nothing, 0/0."""
    terms = [loss * weight for loss, weight in zip(losses, weights, strict=True) if weight != 0]
    return sum(terms[1:], start=terms[0])
