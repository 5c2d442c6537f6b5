"""Gradients of the caller's own batch, put together from those of its micro-batches."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.model.pytree import flatten

from .run import Run


def accumulate_into_inputs(inputs: Any, run: Run) -> None:
    """Send what came back for the tensors of `inputs` to their `.grad`, or on through what made
    them.
    """
    found = zip(wanting(inputs), input_gradients(run), strict=False)
    pairs = [(leaf, gradient) for leaf, gradient in found if gradient is not None]
    if pairs:
        torch.autograd.backward([leaf for leaf, _ in pairs], [gradient for _, gradient in pairs])


def wanting(inputs: Any) -> list[Tensor]:
    """List the tensors that gradients are sent to; those of a micro-batch are parts of these, in
    the same order, while lists with one entry per sample have other tensors in each.
    """
    return [leaf for leaf in flatten(inputs)[0] if leaf.requires_grad]


def input_gradients(run: Run) -> list[Tensor | None]:
    """Return the gradients of those of the caller's inputs that are `wanting` one, in order; None
    where there is none.
    """
    sizes = run.batch.sizes
    rows = []
    for i, part in enumerate(run.batch.inputs):
        leaves = flatten(part)[0]
        found = run.input_gradients.get(i, (None,) * len(leaves))
        pairs = zip(leaves, found, strict=False)
        rows.append([gradient for leaf, gradient in pairs if leaf.requires_grad])
    devices = [leaf.device for leaf in wanting(run.batch.inputs[0])]
    return [
        _join(column, sizes, device)
        for column, device in zip(zip(*rows, strict=True), devices, strict=False)
    ]


def _join(
    pieces: Sequence[Tensor | None], sizes: Sequence[int], device: torch.device
) -> Tensor | None:
    """Concatenate the micro-batches' gradients of one input; None if no micro-batch has one."""
    some = next((piece for piece in pieces if piece is not None), None)
    if some is None:
        return None
    whole = torch.cat(
        [
            some.new_zeros((size, *some.shape[1:])) if piece is None else piece
            for piece, size in zip(pieces, sizes, strict=True)
        ]
    )
    return whole.to(device)
