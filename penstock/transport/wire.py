"""Tensors as bytes: their description, and their exact strides and alignment at the receiver.

Kernels add in an order that depends on strides, and on the distance from a cache line's start.  So
a tensor arrives with both unchanged, and a step has the same bits on every transport.
"""

from ctypes import c_char
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.model.copies import CACHE_LINE_BYTES
from penstock.model.entries import as_plain


class TensorKind(NamedTuple):
    """The description of a tensor; `distance` is in bytes after a cache line's start."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    distance: int
    type: type[Tensor]

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorKind":
        distance = tensor.data_ptr() % CACHE_LINE_BYTES
        return cls(tensor.dtype, tensor.shape, tensor.stride(), distance, type(tensor))

    @property
    def num_bytes(self) -> int:
        """Bytes that travel."""
        return _layout(self).num_bytes


@dataclass(frozen=True, slots=True)
class _Layout:
    """The memory of a tensor.

    `shape` has length 1 in expanded dims.  `order` are the dims from the widest stride to the
    narrowest.  `span` is the number of elements from the first to the last; if `is_dense`, all of
    them are the tensor's.
    """

    shape: tuple[int, ...]
    order: tuple[int, ...]
    span: int
    is_dense: bool
    is_expanded: bool
    num_values: int
    num_bytes: int


@lru_cache(maxsize=1024)
def _layout(kind: TensorKind) -> _Layout:
    pairs = list(zip(kind.shape, kind.strides, strict=True))
    shape = tuple(min(size, 1) if stride == 0 else size for size, stride in pairs)
    order = tuple(sorted(range(len(shape)), key=lambda d: (-kind.strides[d], d)))
    # From the narrowest stride outwards: each stride is the product of the lengths inside it.
    num_values, is_dense = 1, True
    for dim in reversed(order):
        is_dense = is_dense and (shape[dim] <= 1 or kind.strides[dim] == num_values)
        num_values *= shape[dim]
    return _Layout(
        shape,
        order,
        1 + sum((size - 1) * stride for size, stride in pairs if size > 1),
        is_dense,
        shape != kind.shape,
        prod(shape),
        prod(shape) * kind.dtype.itemsize,
    )


def to_bytes(tensor: Tensor, kind: TensorKind) -> Tensor:
    """Return a tensor's values as bytes, in memory order; a view if there are no gaps."""
    layout, plain = _layout(kind), as_plain(tensor).detach()
    if plain.is_conj() or plain.is_neg():
        plain = plain.resolve_conj().resolve_neg()
    elif layout.is_dense:
        return plain.as_strided((layout.num_values,), (1,)).view(torch.uint8)
    compact = _without_repetition(plain, kind)
    flat = compact.permute(layout.order).contiguous().view(-1)
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)  # a single value may have stride 0


def room_for(kind: TensorKind, device: torch.device) -> tuple[Tensor, Tensor]:
    """Allocate a tensor, aligned as the sent one, and the bytes to receive; return bytes, tensor.

    The bytes are the tensor's memory, or separate if it has gaps; `fill` then copies them.
    """
    layout, tensor = _layout(kind), None
    if layout.num_bytes == 0 or not layout.is_expanded:
        tensor = torch.empty_strided(kind.shape, kind.strides, dtype=kind.dtype, device=device)
        if layout.num_bytes and tensor.data_ptr() % CACHE_LINE_BYTES != kind.distance:
            tensor = None
    if tensor is None:  # a line more memory than needed: one start in it has the right distance
        num_bytes = layout.span * kind.dtype.itemsize
        base = torch.empty(num_bytes + CACHE_LINE_BYTES, dtype=torch.uint8, device=device)
        start = (kind.distance - base.data_ptr()) % CACHE_LINE_BYTES
        values = base[start : start + num_bytes].view(kind.dtype)
        tensor = values.as_strided(kind.shape, kind.strides, values.storage_offset())
    if layout.is_dense:
        return tensor.as_strided((layout.num_values,), (1,)).view(torch.uint8), tensor
    return torch.empty(layout.num_bytes, dtype=torch.uint8, device=device), tensor


def memory_of(tensor: Tensor, kind: TensorKind) -> Any:
    """Return the memory of a CPU tensor as bytes to send: a copy only if there are gaps."""
    tensor = as_plain(tensor)
    if not _layout(kind).is_dense or tensor.is_conj() or tensor.is_neg():
        tensor = to_bytes(tensor, kind)
    memory: Any = (c_char * kind.num_bytes).from_address(tensor.data_ptr())
    memory.owner = tensor  # lives as long as this view of it
    return memory


def fill(tensor: Tensor, received: Tensor, kind: TensorKind) -> Tensor:
    """Copy received bytes into their tensor, unless they are its memory; restore its class."""
    layout = _layout(kind)
    if layout.is_dense or layout.num_bytes == 0:
        return _of_class(tensor, kind)
    back = [layout.order.index(dim) for dim in range(len(layout.order))]
    size = [layout.shape[dim] for dim in layout.order]
    compact = received.view(kind.dtype).view(size).permute(back)
    _without_repetition(tensor, kind).copy_(compact)
    return _of_class(tensor, kind)


# -- row by row, whatever the strides: the same bytes on all processes with the same values ------


def num_row_bytes(kind: TensorKind) -> int:
    """Return the length of `row_bytes`; it depends on type and shape alone."""
    return prod(kind.shape) * kind.dtype.itemsize


def row_bytes(tensor: Tensor) -> Tensor:
    """Return all values as bytes, row by row; a view of a contiguous tensor."""
    plain = as_plain(tensor).detach().resolve_conj().resolve_neg().contiguous()
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)


def room_for_rows(kind: TensorKind, device: torch.device) -> tuple[Tensor, Tensor]:
    """Allocate as `room_for`, for bytes row by row; `fill_rows` copies them."""
    received, tensor = room_for(kind, device)
    if not tensor.is_contiguous():
        received = torch.empty(num_row_bytes(kind), dtype=torch.uint8, device=device)
    return received, tensor


def fill_rows(tensor: Tensor, received: Tensor, kind: TensorKind) -> Tensor:
    """Do as `fill`, with bytes row by row."""
    if tensor.is_contiguous():
        return fill(tensor, received, kind)
    values = _without_repetition(received.view(kind.dtype).view(kind.shape), kind)
    _without_repetition(tensor, kind).copy_(values)
    return _of_class(tensor, kind)


def _of_class(tensor: Tensor, kind: TensorKind) -> Tensor:
    return tensor if kind.type is Tensor else tensor.as_subclass(kind.type)


def _without_repetition(tensor: Tensor, kind: TensorKind) -> Tensor:
    for dim, stride in enumerate(kind.strides):
        if stride == 0 and kind.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor
