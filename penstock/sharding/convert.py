"""Convert what each device holds from one layout to another, and gradients on their way back."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .layouts import Move, S, State, moves

if TYPE_CHECKING:
    from penstock.mesh.collectives import Collectives

_WHAT = "for the other shards of the stage"


class _How(NamedTuple):
    """A move along an axis, and the states before and after it."""

    axis: "Collectives"
    move: Move
    before: State
    after: State


def convert(tensor: Tensor, before: State, after: State, axis: "Collectives") -> Tensor:
    """Return what this device holds of a value that is to be in another state.

    Every device of the axis makes the same calls.  The gradient is converted back.
    """
    if before == after or axis.size == 1:
        return tensor
    if tensor.requires_grad and torch.is_grad_enabled():
        converted: Tensor = _Conversion.apply(tensor, before, after, axis)  # type: ignore[no-untyped-call]
        return converted
    return _moved(tensor, _How(axis, moves(before, after)[0], before, after))


class _Conversion(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, before: State, after: State, axis: "Collectives"
    ) -> Tensor:
        forward, backward = moves(before, after)
        ctx.back = _How(axis, backward, after, before)
        moved = _moved(tensor, _How(axis, forward, before, after))
        return moved.view_as(moved) if moved is tensor else moved

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        return None if gradient is None else _moved(gradient, ctx.back), None, None, None


def _moved(tensor: Tensor, how: _How) -> Tensor:
    """Return what the device holds afterwards; what comes from others is new memory."""
    return tensor if how.move is Move.NONE else _MOVES[how.move](tensor, how)


def _mask(tensor: Tensor, how: _How) -> Tensor:
    return tensor if how.axis.rank == 0 else torch.zeros_like(tensor)


def _slice(tensor: Tensor, how: _How) -> Tensor:
    return _parts(tensor, how)[how.axis.rank]


def _pad(tensor: Tensor, how: _How) -> Tensor:
    dim, length = _dim(how.before), tensor.shape[_dim(how.before)]
    shape = list(tensor.shape)
    shape[dim] *= how.axis.size
    whole = tensor.new_zeros(shape)
    whole.narrow(dim, how.axis.rank * length, length).copy_(tensor)
    return whole


def _all_reduce(tensor: Tensor, how: _How) -> Tensor:
    whole = tensor.clone(memory_format=torch.contiguous_format)
    how.axis.all_reduce(whole, _WHAT)
    return whole


def _all_gather(tensor: Tensor, how: _How) -> Tensor:
    return torch.cat(how.axis.all_gather(tensor.contiguous(), _WHAT), _dim(how.before))


def _reduce_scatter(tensor: Tensor, how: _How) -> Tensor:
    return how.axis.reduce_scatter(_parts(tensor, how), _WHAT)


def _all_to_all(tensor: Tensor, how: _How) -> Tensor:
    parts = _parts(tensor, how)
    shapes = [parts[how.axis.rank].shape] * how.axis.size
    return torch.cat(how.axis.all_to_all(parts, shapes, _WHAT), _dim(how.before))


_MOVES: dict[Move, Callable[[Tensor, _How], Tensor]] = {
    Move.MASK: _mask,
    Move.SLICE: _slice,
    Move.PAD: _pad,
    Move.ALL_REDUCE: _all_reduce,
    Move.ALL_GATHER: _all_gather,
    Move.REDUCE_SCATTER: _reduce_scatter,
    Move.ALL_TO_ALL: _all_to_all,
}


def _parts(tensor: Tensor, how: _How) -> list[Tensor]:
    """Cut a tensor as it is to be afterwards."""
    return [part.contiguous() for part in tensor.tensor_split(how.axis.size, _dim(how.after))]


def _dim(state: State) -> int:
    assert isinstance(state, S), state
    return state.dim
