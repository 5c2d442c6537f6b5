"""Leaves of a stage's autograd graph for tensors of other stages, and layouts of slices."""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from torch import Tensor, nn

from penstock.torch_private import version_counter

LASTING = "penstock_lasting"
"""The attribute of a tensor that is a parameter of another stage."""
_LAYOUT = "penstock_layout"
"""The attribute of a device's slice of a value, with its layout."""
_PLAIN = {Tensor, type(None)}
_NO_STATE = {LASTING, _LAYOUT, "_is_param"}
"""Attributes without which a tensor can be rebuilt."""


@dataclass(slots=True)
class Entry:
    """A tensor that a stage received, and the gradient of its backward.

    `node` is the tensor's gradient accumulator.  A hook on it puts the gradient into `caught`
    exactly as the engine computed it; `.grad` would change its strides to those of the tensor.
    The hook refers to `caught` only, so that there is no reference cycle.
    """

    tensor: Tensor
    node: Any = None
    caught: list[Tensor | None] = field(default_factory=list)

    @property
    def gradient(self) -> Tensor | None:
        return self.caught[0] if self.caught else None


def make_entry(tensor: Tensor, wants_grad: bool) -> Entry:
    """Detach a tensor as a plain one; with `wants_grad`, catch its gradient in the backward."""
    leaf = as_plain(tensor).detach()
    if not wants_grad:
        return Entry(leaf)
    # A leaf's gradient accumulator is found through any node that leads to it, such as a view's.
    view = leaf.requires_grad_().view_as(leaf)
    assert view.grad_fn is not None
    node, caught = view.grad_fn.next_functions[0][0], []
    assert node is not None

    def catch(gradients: tuple[Tensor | None, ...]) -> tuple[None]:
        caught.append(gradients[0])
        return (None,)

    node.register_prehook(catch)
    return Entry(leaf, node, caught)


def lasts(tensor: Tensor) -> bool:
    """Tell whether a tensor is a parameter, of this stage or another one."""
    return isinstance(tensor, nn.Parameter) or hasattr(tensor, LASTING)


def mark_layout(tensor: Tensor, layout: Any) -> None:
    """Attach the layout, with sizes, to a device's slice of a value."""
    setattr(tensor, _LAYOUT, layout)


def layout_on(value: Any) -> Any:
    """Return the layout of a slice; None if the value is whole."""
    return getattr(value, _LAYOUT, None)


@lru_cache(maxsize=4096)
def whole_size(
    shape: tuple[int, ...], strides: tuple[int, ...] | None, layout: Any
) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """Return the shape and the strides of the whole tensor of a slice."""
    for state in reversed(layout):
        sizes, dim = getattr(state, "sizes", ()), getattr(state, "dim", 0)
        if not sizes:
            continue
        here, whole = max(shape[dim], 1), sum(sizes)
        shape = (*shape[:dim], whole, *shape[dim + 1 :])
        if strides is not None:
            strides = tuple(
                own * max(whole, 1) // here if (own, -place) > (strides[dim], -dim) else own
                for place, own in enumerate(strides)
            )
    return shape, strides


def layouts_on(values: Sequence[Tensor]) -> tuple[Any, ...]:
    """Return the layouts of values; () if all are whole."""
    layouts = tuple([getattr(value, _LAYOUT, None) for value in values])
    return layouts if any(layouts) else ()


def marked(tensor: Tensor, layouts: Sequence[Any], place: int) -> Tensor:
    """Attach its layout to a tensor of a message, if there are several slices."""
    layout = layouts[place] if layouts else None
    if layout and any(len(getattr(state, "sizes", ())) > 1 for state in layout):
        mark_layout(tensor, layout)
    return tensor


def version_of(tensor: Tensor) -> int:
    """Return the number of changes in place; inference tensors do not count them."""
    return 0 if tensor.is_inference() else version_counter(tensor)


def are_plain(tensors: Iterable[Tensor | None]) -> bool:
    """Tell whether all tensors are of the class Tensor itself, or None."""
    return {*map(type, tensors)} <= _PLAIN


def is_plain_class(tensor: Tensor) -> bool:
    """Tell whether a tensor is of the class Tensor itself, or a parameter."""
    return type(tensor) is Tensor or issubclass(type(tensor), nn.Parameter)


def can_be_made_again(tensor: Tensor) -> bool:
    """Tell whether a tensor can be rebuilt from its class and a plain tensor of its values.

    It cannot if it holds other tensors, as classes with `__torch_dispatch__` do, or attributes, or
    if another process cannot import its class.
    """
    kind = type(tensor)
    importable: Any = sys.modules.get(kind.__module__)
    for part in kind.__qualname__.split("."):
        importable = getattr(importable, part, None)
    return (
        kind.__torch_dispatch__ is Tensor.__torch_dispatch__
        and vars(tensor).keys() <= _NO_STATE
        and not any(vars(base).get("__slots__") for base in kind.__mro__)
        and importable is kind
        and type(tensor.as_subclass(Tensor)) is Tensor
    )


def as_plain(tensor: Tensor) -> Tensor:
    """Return a tensor as a plain one with the same values and graph, if it can be rebuilt."""
    if type(tensor) is Tensor or is_plain_class(tensor) or not can_be_made_again(tensor):
        return tensor
    return tensor.as_subclass(Tensor)


def like(tensor: Tensor, model: Tensor) -> Tensor:
    """Return a plain tensor in the class of `model`."""
    is_alike = is_plain_class(model) or type(tensor) is type(model)
    return tensor if is_alike else tensor.as_subclass(type(model))


def detached(tensor: Tensor) -> Tensor:
    """Detach a tensor; the result has the same class."""
    if type(tensor) is Tensor or is_plain_class(tensor):
        return tensor.detach()
    plain = as_plain(tensor)
    return tensor.detach() if plain is tensor else like(plain.detach(), tensor)
