"""Convert values from one layout to another, and their gradients back.

convert    for each use, or once for a step
Regather   for a layer's forward, and again for its backward; freed in between
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, assert_never

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from penstock.costs.counting.layer_calls import as_it_is
from penstock.errors import sparse_gradient
from penstock.sharding.layouts import Layout, Move, S, State, moves, steps
from penstock.torch_private import saving_hooks, storage_id

if TYPE_CHECKING:
    from penstock.mesh.collectives import Collectives

_WHAT = "for the other shards of the stage"


_Step = tuple["Collectives", State, State]
"""A conversion along one axis: the axis, and the states before and after."""


def convert(
    tensor: Tensor,
    before: Layout,
    after: Layout,
    axes: "Sequence[Collectives]",
    kept: dict[Layout, Tensor] | None = None,
) -> Tensor:
    """Return this device's part of a value in another layout; both layouts have sizes.

    All devices of an axis must make the same calls.  The gradient is converted back, for each use.
    `kept` caches values by layout: each is converted once.
    """
    if kept is not None and after not in kept:
        kept[after] = convert(tensor.detach(), before, after, axes)
    along = [(axes[n], old, new) for n, old, new in steps(before, after) if axes[n].size > 1]
    if not along:
        return tensor
    cached = None if kept is None else kept[after]
    if not (tensor.requires_grad and torch.is_grad_enabled()):
        return _converted(tensor, along) if cached is None else cached
    conversion: Any = _Conversion  # torch leaves `apply` untyped
    converted: Tensor = conversion.apply(tensor, along, cached)
    return converted


class _Conversion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, along: Sequence[_Step], cached: Tensor | None) -> Tensor:
        ctx.along = along
        moved = _converted(tensor, along) if cached is None else cached
        return moved.view_as(moved) if moved is tensor or moved is cached else moved

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        for axis, old, new in reversed(ctx.along if gradient is not None else ()):
            gradient = _moved(gradient, moves(old, new)[1], (axis, new, old))
        return gradient, None, None


def _converted(tensor: Tensor, along: Sequence[_Step]) -> Tensor:
    for axis, old, new in along:
        tensor = _moved(tensor, moves(old, new)[0], (axis, old, new))
    return tensor


def _moved(  # noqa: C901 - one flat match
    tensor: Tensor, move: Move, step: _Step
) -> Tensor:
    """Return the device's part, in new memory if received; ConfigError for a sparse gradient."""
    if tensor.layout is not torch.strided:
        raise sparse_gradient("a layer", tuple(tensor.shape))
    axis, before, after = step
    rank = axis.rank
    match move:
        case Move.NONE:
            return tensor
        case Move.MASK:
            return tensor if rank == 0 else torch.zeros_like(tensor)
        case Move.SLICE:  # copy: a view holds the whole's memory
            return _parts(tensor, after)[rank].clone(memory_format=torch.contiguous_format)
        case Move.PAD:
            cut = cut_of(before)
            shape = list(tensor.shape)
            shape[cut.dim] = sum(cut.sizes)
            whole = tensor.new_zeros(shape)
            whole.narrow(cut.dim, sum(cut.sizes[:rank]), cut.sizes[rank]).copy_(tensor)
            return whole
        case Move.ALL_REDUCE:
            whole = tensor.clone(memory_format=torch.contiguous_format)
            axis.all_reduce(whole, _WHAT)
            return whole
        case Move.ALL_GATHER:
            cut = cut_of(before)
            shapes = None if len(set(cut.sizes)) == 1 else shapes_of(tensor, cut)
            return torch.cat(axis.all_gather(tensor.contiguous(), _WHAT, shapes), cut.dim)
        case Move.REDUCE_SCATTER:
            return axis.reduce_scatter(_parts(tensor, after), _WHAT)
        case Move.ALL_TO_ALL:
            parts, cut = _parts(tensor, after), cut_of(before)
            return torch.cat(axis.all_to_all(parts, shapes_of(parts[rank], cut), _WHAT), cut.dim)
        case _:
            assert_never(move)


def _parts(tensor: Tensor, after: State) -> Sequence[Tensor]:
    cut = cut_of(after)
    parts: Sequence[Tensor] = torch.split(tensor, list(cut.sizes), cut.dim)
    return parts


def shapes_of(part: Tensor, cut: S) -> list[list[int]]:
    """Return the shapes of all slices, of which `part` is one."""
    shape = list(part.shape)
    return [[*shape[: cut.dim], length, *shape[cut.dim + 1 :]] for length in cut.sizes]


def cut_of(state: State) -> S:
    """Return a state that has to be one of slices."""
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
        # Hooks do not nest: torch runs the innermost pair only, so this pair calls the one around.
        around: Any = saving_hooks() or (as_it_is, as_it_is)
        self._pack: Callable[[Tensor], Any] = around[0]
        self._unpack: Callable[[Any], Tensor] = around[1]

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
        # The hook of each result calls this; the first one to arrive gathers all weights.
        hows, self._hows = self._hows, []
        for (local, *how), gathered in zip(hows, self._gathered, strict=bool(hows)):
            made = convert(local.detach(), *how)  # also where no node is left: all devices call it
            whole = gathered()
            if whole is not None:
                whole.tensor = made

    def _packed(self, tensor: Tensor) -> Any:
        made = self._made.get(storage_id(tensor))
        if made is None:
            return self._pack(tensor)
        return _Saved(made[1], (tensor.shape, tensor.stride(), tensor.storage_offset()))

    def _unpacked(self, saved: Any) -> Tensor:
        if not isinstance(saved, _Saved):
            return self._unpack(saved)
        assert saved.whole.tensor is not None, "a backward that began inside a layer"
        return saved.whole.tensor.as_strided(*saved.place)


class _Whole:
    """The holder of a weight that will be gathered again."""

    tensor: Tensor | None = None


class _Saved(NamedTuple):
    """The shape, strides and offset of a saved tensor in a weight that is gathered again."""

    whole: _Whole
    place: tuple[Any, ...]
