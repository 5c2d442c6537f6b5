"""What autograd saves in a forward, in slots that can be emptied and filled again.

    forward ──► autograd saves ──► slot ──► moved away, or dropped
    backward ◄── autograd asks ◄── slot ◄── brought back, or computed again

Hooks keep torch from seeing that a saved tensor was changed in place; slots see to it instead.
"""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, UntypedStorage
from torch.autograd.graph import saved_tensors_hooks

from penstock.errors import RecomputeError
from penstock.model.entries import is_plain_class, version_of
from penstock.torch_private import NEVER_COMPUTES, storage_id


class Layout(NamedTuple):
    """How a tensor lies in its storage."""

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> "Layout":
        """Read how a tensor lies."""
        return cls(tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def view(self, storage: UntypedStorage, lead: int) -> Tensor:
        """Make the tensor that lies so in what follows the first `lead` bytes of a storage."""
        tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
        offset = self.offset + lead // self.dtype.itemsize
        return tensor.set_(storage, offset, self.shape, self.stride)


class Slot:
    """The place of one tensor; empty while its values are elsewhere, or dropped."""

    __slots__ = ("__weakref__", "_version", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None
        self.fill(tensor)

    def fill(self, tensor: Tensor) -> None:
        """Hold a tensor, as it is now."""
        self.tensor, self._version = tensor, version_of(tensor)

    @property
    def is_as_saved(self) -> bool:
        """Whether the tensor is there, and was not changed in place since."""
        return self.tensor is not None and version_of(self.tensor) == self._version

    def take(self) -> Tensor:
        """Return the tensor.

        Raises:
            RecomputeError: it was dropped, and was not computed again yet.
            RuntimeError: it was changed in place since.
        """
        if self.tensor is None:
            raise RecomputeError(
                "gradients are computed in a forward (torch.autograd.grad, a penalty on a "
                "gradient) through a layer that is recomputed, and whose activations are not "
                "kept; recompute other layers, or use recompute=Recompute.NEVER"
            )
        if not self.is_as_saved:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: a {self.tensor.dtype} tensor of shape "
                f"{tuple(self.tensor.shape)} is at version {version_of(self.tensor)}, and was "
                f"saved at version {self._version}"
            )
        return self.tensor


Emptied = tuple[ref[Slot], Layout | None]
"""A slot that was emptied, and how its tensor lay; None where nobody will ask for it."""


class Slots:
    """What one forward saved, for as long as its graph lives.

    The storages of `lasting` are not the stage's own: weights, buffers, the caller's batch.
    """

    def __init__(self, lasting: Iterable[Tensor]) -> None:
        self._lasting = {storage_id(tensor) for tensor in lasting}
        self._saved: list[ref[Slot]] = []

    def hooks(self) -> saved_tensors_hooks:
        """Let autograd save into slots inside."""
        return saved_tensors_hooks(self._pack, unpack)

    def _pack(self, tensor: Tensor) -> Slot | Tensor:
        return self.keep(tensor) if is_plain_class(tensor) else tensor

    def keep(self, tensor: Tensor) -> Slot:
        """Put a tensor into a slot, as autograd does."""
        slot = Slot(tensor.detach())
        if self.may_move(tensor):
            self._saved.append(ref(slot))
        return slot

    def mark(self) -> int:
        """Mark where the next slot comes."""
        return len(self._saved)

    def empty(self, which: slice) -> list[Emptied]:
        """Empty some of the slots, by the marks before and after them."""
        emptied: list[Emptied] = []
        for each in self._saved[which]:
            slot, layout = each(), None
            if slot is not None and slot.tensor is not None:
                layout, slot.tensor = Layout.of(slot.tensor), None
            emptied.append((each, layout))
        return emptied

    def may_move(self, tensor: Tensor) -> bool:
        """Tell whether a tensor is no more than its values, and those are the stage's own."""
        return (
            is_plain_class(tensor)
            and tensor.layout is torch.strided
            and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)
            and storage_id(tensor) not in self._lasting
        )

    def __iter__(self) -> Iterator[Slot]:
        """Yield the slots whose tensors may move, in the order in which autograd saved."""
        return (slot for each in self._saved if (slot := each()) is not None)


def unpack(saved: Slot | Tensor) -> Tensor:
    return saved.take() if isinstance(saved, Slot) else saved


setattr(unpack, NEVER_COMPUTES, True)


def without_values(tensor: Tensor) -> Tensor:
    """Return a tensor of the same shape and type that takes no memory to speak of.

    Gradients flow through unchanged.
    """
    empty: Tensor = _WithoutValues.apply(tensor)  # type: ignore[no-untyped-call]  # torch
    return empty


class _WithoutValues(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.new_empty(()).expand(tensor.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient
