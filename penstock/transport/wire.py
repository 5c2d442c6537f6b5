"""Tensors on the wire: what describes them, and how they keep their strides and alignment.

The order in which kernels add depends on strides, and on how far data lies from a cache line's
start; so a tensor arrives with both as it left.
"""

from ctypes import c_char
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.model.entries import as_plain

CACHE_LINE_BYTES = 64


class TensorKind(NamedTuple):
    """All of a tensor but its values; `distance` is in bytes behind a cache line's start."""

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
    """How values lie in memory.

    `shape` is without repetition: an expanded dimension counts once.  `order` are the dimensions
    from the widest stride to the narrowest.  `span` counts values from the first to the last one;
    `is_dense` says that each of them is the tensor's.
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
    """Return a tensor's values as bytes, in order of its memory; a view if there are no gaps."""
    layout, plain = _layout(kind), as_plain(tensor).detach()
    if plain.is_conj() or plain.is_neg():
        plain = plain.resolve_conj().resolve_neg()
    elif layout.is_dense:
        return plain.as_strided((layout.num_values,), (1,)).view(torch.uint8)
    compact = _without_repetition(plain, kind)
    flat = compact.permute(layout.order).contiguous().view(-1)
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)  # one value may have stride 0


def room_for(kind: TensorKind, device: torch.device) -> tuple[Tensor, Tensor]:
    """Make room: the bytes to receive into, and the tensor that they are, or will be once filled.

    Where the tensor has gaps between its values the bytes lie elsewhere; `fill` moves them.
    """
    layout = _layout(kind)
    tensor = _aligned(kind, layout, device)
    if layout.is_dense:
        return tensor.as_strided((layout.num_values,), (1,)).view(torch.uint8), tensor
    return torch.empty(layout.num_bytes, dtype=torch.uint8, device=device), tensor


def _aligned(kind: TensorKind, layout: _Layout, device: torch.device) -> Tensor:
    """Make a tensor that begins as far from a cache line's start as the one that was sent."""
    if layout.num_bytes == 0 or not layout.is_expanded:
        tensor = torch.empty_strided(kind.shape, kind.strides, dtype=kind.dtype, device=device)
        if layout.num_bytes == 0 or tensor.data_ptr() % CACHE_LINE_BYTES == kind.distance:
            return tensor
    num_bytes = layout.span * kind.dtype.itemsize
    base = torch.empty(num_bytes + CACHE_LINE_BYTES, dtype=torch.uint8, device=device)
    start = (kind.distance - base.data_ptr()) % CACHE_LINE_BYTES
    values = base[start : start + num_bytes].view(kind.dtype)
    return values.as_strided(kind.shape, kind.strides, values.storage_offset())


def memory_of(tensor: Tensor, kind: TensorKind) -> Any:
    """Return the memory of a CPU tensor as bytes to send: a copy only if there are gaps."""
    tensor = as_plain(tensor)
    if not _layout(kind).is_dense or tensor.is_conj() or tensor.is_neg():
        tensor = to_bytes(tensor, kind)
    return _bytes_at(tensor, kind.num_bytes)


def _bytes_at(tensor: Tensor, num_bytes: int) -> Any:
    memory: Any = (c_char * num_bytes).from_address(tensor.data_ptr())
    memory.owner = tensor  # lives as long as this view of it
    return memory


def fill(tensor: Tensor, received: Tensor, kind: TensorKind) -> Tensor:
    """Move received bytes into their tensor, if they are not there already; give it its class."""
    layout = _layout(kind)
    if layout.is_dense or layout.num_bytes == 0:
        return _of_class(tensor, kind)
    back = [layout.order.index(dim) for dim in range(len(layout.order))]
    size = [layout.shape[dim] for dim in layout.order]
    compact = received.view(kind.dtype).view(size).permute(back)
    _without_repetition(tensor, kind).copy_(compact)
    return _of_class(tensor, kind)


# -- in the order of rows, whatever the strides: alike on all processes with the same values --


def num_row_bytes(kind: TensorKind) -> int:
    """Return how many `row_bytes` a tensor has; it depends on its type and shape alone."""
    return prod(kind.shape) * kind.dtype.itemsize


def row_bytes(tensor: Tensor) -> Tensor:
    """Return all values as bytes, row by row; a view if they lie like that."""
    plain = as_plain(tensor).detach().resolve_conj().resolve_neg().contiguous()
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)


def room_for_rows(kind: TensorKind, device: torch.device) -> tuple[Tensor, Tensor]:
    """Make room as `room_for`, for bytes row by row; `fill_rows` moves them."""
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
