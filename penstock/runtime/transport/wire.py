"""Tensors on the wire: what describes them, and how they keep their strides and alignment.

The order in which kernels add depends on strides, and on how far data lies from a cache line's
start; so a tensor arrives with both as it left.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

CACHE_LINE_BYTES = 64


@dataclass(frozen=True, slots=True)
class TensorKind:
    """All of a tensor but its values; `distance` is in bytes behind a cache line's start."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    distance: int

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorKind":
        return cls(
            tensor.dtype,
            tuple(tensor.shape),
            tensor.stride(),
            tensor.data_ptr() % CACHE_LINE_BYTES,
        )

    @property
    def compact_shape(self) -> tuple[int, ...]:
        """The shape without repetition: an expanded dimension counts once."""
        return tuple(1 if s == 0 else n for n, s in zip(self.shape, self.strides, strict=True))

    @property
    def num_bytes(self) -> int:
        """Bytes that travel."""
        return _product(self.compact_shape) * self.dtype.itemsize

    @property
    def order(self) -> list[int]:
        """Dimensions from the widest stride to the narrowest."""
        return sorted(range(len(self.shape)), key=lambda d: (-self.strides[d], d))


def to_bytes(tensor: Tensor, kind: TensorKind) -> Tensor:
    """Give a tensor's values as bytes, in the order of its memory; a view if there are no gaps."""
    compact = tensor.detach()
    for dim, stride in enumerate(kind.strides):
        if stride == 0:
            compact = compact.narrow(dim, 0, 1)
    if compact.is_conj() or compact.is_neg():
        compact = compact.resolve_conj().resolve_neg()
    flat = compact.permute(kind.order).contiguous().view(-1)
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)  # one value may have stride 0


def room_for(kind: TensorKind, device: torch.device) -> tuple[Tensor, Tensor]:
    """Make room: the bytes to receive into, and the tensor that they are, or will be once filled.

    Where the tensor has gaps between its values the bytes lie elsewhere; `fill` moves them.
    """
    size = tuple(kind.compact_shape[d] for d in kind.order)
    span = 1 + sum(
        (n - 1) * s for n, s in zip(kind.compact_shape, kind.strides, strict=True) if n > 1
    )
    item = kind.dtype.itemsize
    base = torch.empty(max(span, 1) * item + CACHE_LINE_BYTES, dtype=torch.uint8, device=device)
    start = (kind.distance - base.data_ptr()) % CACHE_LINE_BYTES
    if kind.num_bytes == 0:
        return base[:0], torch.empty_strided(
            kind.shape, kind.strides, dtype=kind.dtype, device=device
        )
    values = base[start : start + span * item].view(kind.dtype)
    tensor = values.as_strided(kind.shape, kind.strides, values.storage_offset())
    if span == _product(size):
        return values.view(torch.uint8), tensor
    return torch.empty(kind.num_bytes, dtype=torch.uint8, device=device), tensor


def fill(tensor: Tensor, received: Tensor, kind: TensorKind) -> Tensor:
    """Move received bytes into their tensor, if they are not there already."""
    if (
        kind.num_bytes == 0
        or received.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
    ):
        return tensor
    size = tuple(kind.compact_shape[d] for d in kind.order)
    back = [kind.order.index(d) for d in range(len(kind.order))]
    compact = received.view(kind.dtype).view(size).permute(back)
    target = tensor
    for dim, stride in enumerate(kind.strides):
        if stride == 0:
            target = target.narrow(dim, 0, 1)
    target.copy_(compact)
    return tensor


def _product(numbers: tuple[int, ...]) -> int:
    product = 1
    for number in numbers:
        product *= number
    return product
