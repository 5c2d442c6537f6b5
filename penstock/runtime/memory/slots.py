"""Hold autograd's saved tensors in slots that can be emptied and filled again.

    forward ──► autograd saves ──► slot ──► offloaded, or dropped
    backward ◄── autograd asks ◄── slot ◄── fetched, or recomputed

With hooks torch does not check saved tensors for in-place changes; slots do that.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, UntypedStorage
from torch.autograd.graph import saved_tensors_hooks

from penstock.errors import RecomputeError
from penstock.model.entries import is_plain_class, version_of
from penstock.torch_private import NEVER_COMPUTES, storage_id


class Layout(NamedTuple):
    """The dtype, shape, strides and offset of a tensor in its storage."""

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> "Layout":
        """Read the layout of a tensor."""
        return cls(tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def __str__(self) -> str:
        return f"{self.dtype} of shape {tuple(self.shape)}, strides {self.stride}"

    def view(self, storage: UntypedStorage, lead: int) -> Tensor:
        """Return the tensor with this layout in a storage, behind its first `lead` bytes."""
        tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
        offset = self.offset + lead // self.dtype.itemsize
        return tensor.set_(storage, offset, self.shape, self.stride)


class Slot:
    """The place of one saved tensor; empty while its values are offloaded or dropped.

    `rebuild` fills a slot, and all others of its layer, when autograd asks for a dropped tensor.
    """

    __slots__ = ("__weakref__", "_version", "rebuild", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None
        self.fill(tensor)

    def fill(self, tensor: Tensor) -> None:
        """Hold a tensor, and note its version."""
        self.tensor, self._version = tensor, version_of(tensor)
        self.rebuild: Callable[[], None] | None = None

    @property
    def is_as_saved(self) -> bool:
        """True if the slot holds its tensor, not changed in place since."""
        return self.tensor is not None and version_of(self.tensor) == self._version

    def take(self) -> Tensor:
        """Return the tensor, recomputed if it was dropped.

        A RecomputeError: its forward is not over.  A RuntimeError: it was changed in place.
        """
        if (rebuild := self.rebuild) is not None:
            rebuild()
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


class LayerInput(NamedTuple):
    """An input tensor of a layer, in a slot, or itself if it outlives the tape."""

    saved: Slot | Tensor
    wants_grad: bool

    @property
    def is_as_given(self) -> bool:
        """True if the tensor was not changed in place since."""
        return isinstance(self.saved, Tensor) or self.saved.is_as_saved


Emptied = tuple[ref[Slot], Layout | None]
"""An emptied slot, and its tensor's layout; None if the graph has freed it."""


class Slots:
    """The saved tensors of one forward, for as long as its graph lives.

    The storages of `lasting` outlive the tape: weights, buffers, the caller's batch.
    """

    def __init__(self, lasting: Iterable[Tensor]) -> None:
        # The storages are held, too: a layer may replace a buffer in its forward, and the next
        # tensor would take its address.
        self._lasting = {storage_id(tensor): tensor.untyped_storage() for tensor in lasting}
        self._saved: list[ref[Slot]] = []

    def hooks(self) -> saved_tensors_hooks:
        """Return hooks with which autograd saves into slots."""
        return saved_tensors_hooks(self._pack, unpack)

    def _pack(self, tensor: Tensor) -> Slot | Tensor:
        return self.keep(tensor) if is_plain_class(tensor) else tensor

    def keep(self, tensor: Tensor) -> Slot:
        """Put a tensor into a new slot, as autograd's hook does."""
        slot = Slot(tensor.detach())
        if self.may_move(tensor):
            self._saved.append(ref(slot))
        return slot

    def mark(self) -> int:
        """Return the number of the next slot."""
        return len(self._saved)

    def empty(self, which: slice) -> list[Emptied]:
        """Empty a range of slots."""
        emptied: list[Emptied] = []
        for reference in self._saved[which]:
            slot, layout = reference(), None
            if slot is not None and slot.tensor is not None:
                layout, slot.tensor = Layout.of(slot.tensor), None
            emptied.append((reference, layout))
        return emptied

    @contextmanager
    def filling(self, emptied: Sequence[Emptied], label: str) -> Iterator[None]:
        """Fill a layer's emptied slots, in order, with what autograd saves now.

        A RecomputeError refuses tensors other than those of the layer's forward.
        """
        # Autograd saves in the same order as in the forward: the n-th tensor fills the n-th slot.
        count = 0

        def differs(fault: str) -> RecomputeError:
            return RecomputeError(
                f"layer {label} did not do what it did in its forward: {fault}. It reads "
                "something that changed; recompute other layers, or use recompute=Recompute.NEVER"
            )

        def pack(tensor: Tensor) -> Slot | Tensor:
            nonlocal count
            if not self.may_move(tensor):
                return Slot(tensor.detach()) if is_plain_class(tensor) else tensor
            if count == len(emptied):
                raise differs("it saves more tensors than before")
            # Fill the slot of the first graph; the graph of this rerun gets a slot of its own.
            slot, was = emptied[count]
            count += 1
            again = tensor.detach()
            now = Layout.of(again)
            if was is not None and now[:3] != was[:3]:
                raise differs(f"tensor {count} that it saves was {was}, and is {now}")
            if (empty := slot()) is not None:
                empty.fill(again)
            return Slot(again)

        with saved_tensors_hooks(pack, unpack):
            yield
        if count < len(emptied):
            raise differs(
                f"it saves {count} tensors for its backward, and had saved {len(emptied)}"
            )

    def may_move(self, tensor: Tensor) -> bool:
        """Tell whether a tensor is plain and dense, in memory that ends with the tape."""
        return (
            is_plain_class(tensor)
            and tensor.layout is torch.strided
            and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)
            and storage_id(tensor) not in self._lasting
        )

    def __iter__(self) -> Iterator[Slot]:
        """Yield the slots whose tensors may move, in the order of their saving."""
        return (slot for reference in self._saved if (slot := reference()) is not None)


def unpack(saved: Slot | Tensor) -> Tensor:
    return saved.take() if isinstance(saved, Slot) else saved


setattr(unpack, NEVER_COMPUTES, True)


def without_values(tensor: Tensor) -> Tensor:
    """Return a tensor of that shape with one element of memory; gradients flow through it."""
    empty: Tensor = _WithoutValues.apply(tensor)  # type: ignore[no-untyped-call]  # torch
    return empty


class _WithoutValues(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.new_empty(()).expand(tensor.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient
