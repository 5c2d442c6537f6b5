"""Kernels: functions of torch that need more than to be run on shards.

A kernel is given the function with its shards as arguments, and a `Local`, which knows how they
lie in their wholes.  Most functions have none: they run on shards as they are.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.costs.opaque_modules import OPAQUE

from .layouts import Layout, S
from .rules import base_name
from .sizes import Shape, Sized

if TYPE_CHECKING:
    from penstock.mesh.collectives import Collectives


class Local(NamedTuple):
    """How the shards of one call lie in their wholes, on this device."""

    sized: Sized
    axes: "Sequence[Collectives]"

    def is_cut(self, layout: Layout, dim: int) -> bool:
        """Tell whether devices hold slices along a dimension."""
        return any(isinstance(state, S) and state.dim == dim for state in layout)

    def start(self, layout: Layout, dim: int) -> int:
        """Return where this device's slice along a dimension begins, along all axes."""
        return sum(
            sum(state.sizes[: axis.rank])
            for axis, state in zip(self.axes, layout, strict=True)
            if isinstance(state, S) and state.dim == dim
        )

    def shape_here(self, whole: Sequence[int], layout: Layout) -> list[int]:
        """Return the shape of this device's part of a whole."""
        shape = list(whole)
        for axis, state in zip(self.axes, layout, strict=True):
            if isinstance(state, S):
                shape[state.dim] = state.sizes[axis.rank]
        return shape

    def whole_shape(self, here: Sequence[int], layout: Layout) -> list[int]:
        """Return the shape of the whole of which this device's part has another."""
        shape = list(here)
        for state in reversed(layout):
            if isinstance(state, S):
                shape[state.dim] = sum(state.sizes)
        return shape

    def part_of(self, whole: Tensor, layout: Layout) -> Tensor:
        """Return this device's part of a tensor that is whole."""
        for axis, state in zip(self.axes, layout, strict=True):
            if isinstance(state, S):
                whole = whole.narrow(
                    state.dim, sum(state.sizes[: axis.rank]), state.sizes[axis.rank]
                )
        return whole


Kernel = Callable[[Any, Any, Any, Local], Any]
KERNELS: dict[str, Kernel] = {}


def kernel(*names: str) -> Callable[[Kernel], Kernel]:
    """Register a kernel for functions of these names."""

    def register(own: Kernel) -> Kernel:
        KERNELS.update(dict.fromkeys(names, own))
        return own

    return register


def kernel_of(function: str) -> Kernel | None:
    """Return the kernel of a function or of an opaque module, by its full name."""
    return _opaque if function in OPAQUE else KERNELS.get(base_name(function))


def _opaque(func: Any, args: Any, kwargs: Any, local: Local) -> Tensor:
    """Tell an opaque module where the slices begin that it is given."""
    starts = {
        letter: local.start(layout, dim)
        for letters, layout in zip(OPAQUE[func.__name__].letters, local.sized.takes, strict=False)
        for dim, letter in enumerate(letters)
    }
    result: Tensor = func(*args, **kwargs, starts=starts)
    return result


RESHAPES = ("view", "reshape", "flatten", "unflatten")
"""Functions that merge and divide dimensions."""
_MADE = ("new_zeros", "new_ones", "new_full", "new_empty")
SHAPED = (*RESHAPES, *_MADE, "expand", "broadcast_to", "repeat_interleave")
"""Those, and others whose results are longer or shorter than what they are given."""


def shapes_given(
    name: str, how: tuple[Any, Any, Any], given: Sequence[Any]
) -> tuple[Shape, ...] | None:
    """Return the shapes of whole results of what merges and divides dimensions, or is given a
    shape; None for all else.
    """
    if name not in SHAPED:
        return None
    func, (_, *rest), kwargs = how
    asked = tuple(tuple(x) if isinstance(x, list | tuple) else x for x in rest)
    return (_reshaped(func, given[0].whole_shape, asked, tuple(kwargs.items())),)


@lru_cache(maxsize=4096)
def _reshaped(func: Any, shape: Shape, asked: Any, options: Any) -> Shape:
    whole: Tensor = func(torch.empty(shape, device="meta"), *asked, **dict(options))
    return tuple(whole.shape)


@kernel(*RESHAPES)
def _reshape(func: Any, args: Any, kwargs: Any, local: Local) -> Tensor:
    tensor: Tensor = args[0]
    return tensor.reshape(_shape_asked(local))


@kernel("expand", "broadcast_to")
def _expand(func: Any, args: Any, kwargs: Any, local: Local) -> Tensor:
    tensor: Tensor = args[0]
    return tensor.expand(_shape_asked(local))


@kernel(*_MADE)
def _make(func: Any, args: Any, kwargs: Any, local: Local) -> Tensor:
    """Make this device's part; of what is given by place only the value is no length."""
    value = args[2:] if base_name(func.__name__) == "new_full" else ()
    options = {key: own for key, own in kwargs.items() if key != "size"}
    made: Tensor = func(args[0], _shape_asked(local), *value, **options)
    return made


def _shape_asked(local: Local) -> list[int]:
    assert local.sized.shapes is not None
    return local.shape_here(local.sized.shapes[0], local.sized.gives[0])


@kernel("dropout")
def _dropout(func: Any, args: Any, kwargs: Any, local: Local) -> Tensor:
    """Draw for the whole tensor, so that the numbers are those of one device."""
    (layout,) = local.sized.takes
    tensor, *rest = args
    options = {**dict(zip(("p", "training"), rest, strict=False)), **kwargs}
    drops = options.get("p", 0.5) > 0 and options.get("training", True)
    if not drops or not any(isinstance(state, S) for state in layout):
        same: Tensor = func(*args, **kwargs)
        return same
    whole = local.whole_shape(tensor.shape, layout)
    ones = torch.ones(whole, dtype=tensor.dtype, device=tensor.device)
    mask = local.part_of(F.dropout(ones, *rest, **kwargs), layout)
    masked: Tensor = tensor * mask.clone()  # a view would keep the whole for the backward
    return masked


@kernel("made_like")
def _make_like(func: Any, args: Any, kwargs: Any, local: Local) -> Tensor:
    """Draw random numbers for the whole tensor, as dropout does."""
    (tensor, *rest), (layout,) = args, local.sized.takes
    if not func.__name__.startswith("rand") or not any(isinstance(x, S) for x in layout):
        made: Tensor = func(*args, **kwargs)
        return made
    whole = tensor.new_empty(local.whole_shape(tensor.shape, layout))
    return local.part_of(func(whole, *rest, **kwargs), layout).clone()
