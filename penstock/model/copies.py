"""Copy tensors that a stage receives, and turn leaves into results of an operation."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

CACHE_LINE_BYTES = 64
"""Bytes of a cache line: kernels add in an order that may depend on the place in it."""


def no_leaf(tensor: Tensor) -> Tensor:
    """Return a tensor as the result of an operation, as in the unsplit model.

    Autocast would cast a leaf once for all its uses, and add up their gradients in the lower
    precision.
    """
    if not tensor.requires_grad:
        return tensor
    same: Tensor = _Identity.apply(tensor, Tensor.detach)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return same


def faithful_copy(tensor: Tensor) -> Tensor:
    """Copy a tensor for layers to change in place; gradients flow through unchanged.

    The copy has the strides of the original and the same offset in a cache line: the order of
    sums in matrix kernels depends on both.
    """
    if any(s == 0 and n > 1 for n, s in zip(tensor.shape, tensor.stride(), strict=True)):
        return tensor  # torch refuses to change an expanded tensor in place
    if tensor.requires_grad and torch.is_grad_enabled():
        copied: Tensor = _Identity.apply(tensor, _copy)  # type: ignore[no-untyped-call]  # as above
        return copied
    return _copy(tensor)


class _Identity(torch.autograd.Function):
    """The identity with the same strides; a view could have others."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, make: Callable[[Tensor], Tensor]) -> Tensor:
        return make(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def _copy(tensor: Tensor) -> Tensor:
    if tensor.layout is not torch.strided or tensor.numel() == 0:
        return tensor.clone()
    # Allocate room for the span of all strides, and begin where the cache line matches.
    span = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    spare = CACHE_LINE_BYTES // tensor.element_size()
    room = torch.empty(span + spare, dtype=tensor.dtype, device=tensor.device)
    distance = (tensor.data_ptr() - room.data_ptr()) % CACHE_LINE_BYTES
    copied = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    copied.set_(
        room.untyped_storage(), distance // tensor.element_size(), tensor.shape, tensor.stride()
    )
    return copied.copy_(tensor.detach())
