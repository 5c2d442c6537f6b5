"""Convert values from one layout to another, and their gradients back.

convert        for each use
convert_kept   once for a step
Regather          for a layer's forward, and again for its backward; freed in between
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from penstock.errors import sparse_gradient
from penstock.sharding.layouts import Layout, Move, S, State, moves, steps
from penstock.torch_private import saving_hooks, storage_id

if TYPE_CHECKING:
    from penstock.mesh.collectives import Collectives

_WHAT = "for the other shards of the stage"


class _AxisMove(NamedTuple):
    """A move along one axis, and the states before and after it."""

    axis: "Collectives"
    move: Move
    before: State
    after: State


def convert(
    tensor: Tensor, before: Layout, after: Layout, axes: "Sequence[Collectives]"
) -> Tensor:
    """Return this device's part of a value in another layout; both layouts have sizes.

    All devices of an axis must make the same calls.  The gradient is converted back.
    """
    for number, old, new in steps(before, after):
        axis = axes[number]
        if axis.size == 1:
            continue
        if tensor.requires_grad and torch.is_grad_enabled():
            tensor = _Conversion.apply(tensor, old, new, axis)  # type: ignore[no-untyped-call]
        else:
            tensor = _moved(tensor, _AxisMove(axis, moves(old, new)[0], old, new))
    return tensor


def convert_kept(
    tensor: Tensor,
    before: Layout,
    after: Layout,
    axes: "Sequence[Collectives]",
    kept: dict[Layout, Tensor],
) -> Tensor:
    """Return a value in another layout, converted once and cached in `kept`.

    The gradient is converted back for each use.
    """
    if after not in kept:
        kept[after] = convert(tensor.detach(), before, after, axes)
    if not (tensor.requires_grad and torch.is_grad_enabled()):
        return kept[after]
    back = [
        _AxisMove(axes[number], moves(old, new)[1], new, old)
        for number, old, new in steps(before, after)
        if axes[number].size > 1
    ]
    found: Tensor = _CachedConversion.apply(tensor, kept[after], back)  # type: ignore[no-untyped-call]
    return found


class _CachedConversion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, converted: Tensor, back: Sequence[_AxisMove]) -> Tensor:
        ctx.back = back
        return converted.view_as(converted)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        for how in reversed(ctx.back if gradient is not None else ()):
            gradient = _moved(gradient, how)
        return gradient, None, None


class _Conversion(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, before: State, after: State, axis: "Collectives"
    ) -> Tensor:
        forward, backward = moves(before, after)
        ctx.back = _AxisMove(axis, backward, after, before)
        moved = _moved(tensor, _AxisMove(axis, forward, before, after))
        return moved.view_as(moved) if moved is tensor else moved

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        return None if gradient is None else _moved(gradient, ctx.back), None, None, None


def _moved(tensor: Tensor, how: _AxisMove) -> Tensor:
    """Return the device's part after a move; received values are in new memory.

    Raises:
        ConfigError: the tensor is a sparse gradient.
    """
    if tensor.layout is not torch.strided:
        raise sparse_gradient("a layer", tuple(tensor.shape))
    return tensor if how.move is Move.NONE else _MOVES[how.move](tensor, how)


def _mask(tensor: Tensor, how: _AxisMove) -> Tensor:
    return tensor if how.axis.rank == 0 else torch.zeros_like(tensor)


def _slice(tensor: Tensor, how: _AxisMove) -> Tensor:
    own = _parts(tensor, how)[how.axis.rank]
    return own.clone(memory_format=torch.contiguous_format)  # a view holds the whole's memory


def _pad(tensor: Tensor, how: _AxisMove) -> Tensor:
    cut, rank = _cut(how.before), how.axis.rank
    shape = list(tensor.shape)
    shape[cut.dim] = sum(cut.sizes)
    whole = tensor.new_zeros(shape)
    whole.narrow(cut.dim, sum(cut.sizes[:rank]), cut.sizes[rank]).copy_(tensor)
    return whole


def _all_reduce(tensor: Tensor, how: _AxisMove) -> Tensor:
    whole = tensor.clone(memory_format=torch.contiguous_format)
    how.axis.all_reduce(whole, _WHAT)
    return whole


def _all_gather(tensor: Tensor, how: _AxisMove) -> Tensor:
    cut = _cut(how.before)
    shapes = None if len(set(cut.sizes)) == 1 else _shapes(tensor, cut)
    return torch.cat(how.axis.all_gather(tensor.contiguous(), _WHAT, shapes), cut.dim)


def _reduce_scatter(tensor: Tensor, how: _AxisMove) -> Tensor:
    return how.axis.reduce_scatter(_parts(tensor, how), _WHAT)


def _all_to_all(tensor: Tensor, how: _AxisMove) -> Tensor:
    parts, cut = _parts(tensor, how), _cut(how.before)
    shapes = _shapes(parts[how.axis.rank], cut)
    return torch.cat(how.axis.all_to_all(parts, shapes, _WHAT), cut.dim)


_MOVES: dict[Move, Callable[[Tensor, _AxisMove], Tensor]] = {
    Move.MASK: _mask,
    Move.SLICE: _slice,
    Move.PAD: _pad,
    Move.ALL_REDUCE: _all_reduce,
    Move.ALL_GATHER: _all_gather,
    Move.REDUCE_SCATTER: _reduce_scatter,
    Move.ALL_TO_ALL: _all_to_all,
}


def _parts(tensor: Tensor, how: _AxisMove) -> Sequence[Tensor]:
    """Split a tensor into the slices of the state after a move."""
    cut = _cut(how.after)
    parts: Sequence[Tensor] = torch.split(tensor, list(cut.sizes), cut.dim)
    return parts


def _shapes(part: Tensor, cut: S) -> list[list[int]]:
    """Return the shapes of all slices, of which `part` is one."""
    shape = list(part.shape)
    return [[*shape[: cut.dim], length, *shape[cut.dim + 1 :]] for length in cut.sizes]


def _cut(state: State) -> S:
    assert isinstance(state, S), state
    return state


class Regather:
    """Gathers the weights of one layer call for its forward, and again for its backward.

        forward     gather ──► calls of the layer ──► free; autograd saves a place, not the tensor
        backward    gather, when the gradient of a result arrives ──► calls ──► free with the last
                    node that has saved the weight

    All are gathered at once, so in the same order on all devices.  Gathering each at its first use
    would deadlock: kernels on empty slices save other tensors.  (The third stage of ZeRO,
    Rajbhandari et al. 2020, section 5.3.)
    """

    def __init__(self) -> None:
        self._made: dict[int, tuple[Tensor, _Whole]] = {}
        self._gathered: list[weakref.ref[_Whole]] = []
        self._hows: list[tuple[Any, ...]] = []
        around: tuple[Callable[[Any], Any], ...] = saving_hooks() or (_same, _same)
        self._pack, self._unpack = around

    def note(self, made: Tensor, how: tuple[Any, ...]) -> None:
        """Note a converted weight, if it has its own memory."""
        if made is not how[0]:
            whole = _Whole()
            self._made[storage_id(made)] = made, whole
            self._hows.append(how)
            self._gathered.append(weakref.ref(whole))

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Let autograd save places in these weights instead of the tensors."""
        with saved_tensors_hooks(self._packed, self._unpacked):
            yield
        self._made.clear()

    def before_backward(self, results: Sequence[Any]) -> None:
        """Gather the weights when the gradient of one of the results arrives."""
        for tensor in results:
            if isinstance(tensor, Tensor) and tensor.requires_grad and self._hows:
                tensor.register_hook(self._gather)

    def _gather(self, gradient: Tensor) -> None:
        hows, self._hows = self._hows, []
        for (local, *how), gathered in zip(hows, self._gathered, strict=bool(hows)):
            made = convert(local.detach(), *how)
            whole = gathered()
            if whole is not None:
                whole.tensor = made

    def _packed(self, tensor: Tensor) -> Any:
        found = self._made.get(storage_id(tensor))
        if found is None:
            return self._pack(tensor)
        return _Saved(found[1], (tensor.shape, tensor.stride(), tensor.storage_offset()))

    def _unpacked(self, saved: Any) -> Tensor:
        if not isinstance(saved, _Saved):
            found: Tensor = self._unpack(saved)
            return found
        assert saved.whole.tensor is not None, "a backward that began inside a layer"
        return saved.whole.tensor.as_strided(*saved.place)


class _Whole:
    """The holder of a weight that will be gathered again."""

    tensor: Tensor | None = None


class _Saved(NamedTuple):
    """The shape, strides and offset of a saved tensor in a weight that is gathered again."""

    whole: _Whole
    place: tuple[Any, ...]


def _same(value: Any) -> Any:
    return value
