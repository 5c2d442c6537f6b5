"""Leaves of a stage's own autograd graph for tensors from other stages, and copies of these."""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from torch import Tensor, nn

from penstock.torch_private import version_counter

LASTING = "penstock_lasting"
"""The attribute of a tensor that was sent for a parameter."""
_LAYOUT = "penstock_layout"
_PLAIN = {Tensor, type(None)}
_NO_STATE = {LASTING, _LAYOUT, "_is_param"}


@dataclass(slots=True)
class Entry:
    """A tensor that came into a stage, and the gradient that its backward pass found for it.

    `node` is the tensor's gradient accumulator, held because a hook on it puts the gradient into
    `caught` exactly as the engine computed it; an accumulated `.grad` would be re-laid to the
    tensor's strides.  The hook knows `caught` only, so nothing here forms a cycle.
    """

    tensor: Tensor
    node: Any = None
    caught: list[Tensor | None] = field(default_factory=list)

    @property
    def gradient(self) -> Tensor | None:
        return self.caught[0] if self.caught else None


def make_entry(tensor: Tensor, wants_grad: bool) -> Entry:
    """Detach a tensor, as a plain one; with `wants_grad`, catch the gradient that a backward pass
    finds for it.
    """
    leaf = as_plain(tensor).detach()
    if not wants_grad:
        return Entry(leaf)
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
    """Tell whether a tensor is a parameter, or one that was sent here."""
    return isinstance(tensor, nn.Parameter) or hasattr(tensor, LASTING)


def mark_layout(tensor: Tensor, layout: Any) -> None:
    """Let the layout of slices, with sizes, stand on what a device holds of a value."""
    setattr(tensor, _LAYOUT, layout)


def layout_on(value: Any) -> Any:
    """Return the layout that stands on slices; None: the value is whole."""
    return getattr(value, _LAYOUT, None)


@lru_cache(maxsize=4096)
def whole_size(
    shape: tuple[int, ...], strides: tuple[int, ...] | None, layout: Any
) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """Return the shape and the strides of the whole of which this is a device's part."""
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
    """Return the layouts that stand on values; () if all are whole."""
    found = tuple([getattr(value, _LAYOUT, None) for value in values])
    return found if any(found) else ()


def marked(tensor: Tensor, layouts: Sequence[Any], place: int) -> Tensor:
    """Let its layout stand on what came at a place of a message, if there are several slices."""
    layout = layouts[place] if layouts else None
    if layout and any(len(getattr(state, "sizes", ())) > 1 for state in layout):
        mark_layout(tensor, layout)
    return tensor


def mark_lasting(tensor: Tensor) -> None:
    """Note that a tensor is a parameter of another stage."""
    setattr(tensor, LASTING, True)


def version_of(tensor: Tensor) -> int:
    """Count the changes in place; inference tensors do not count them."""
    return 0 if tensor.is_inference() else version_counter(tensor)


def are_plain(tensors: Iterable[Tensor | None]) -> bool:
    """Tell whether all are a Tensor and nothing else, or not there."""
    return {*map(type, tensors)} <= _PLAIN


def is_plain_class(tensor: Tensor) -> bool:
    """Tell whether a tensor is a Tensor and nothing else, or a parameter, which crosses as one."""
    return type(tensor) is Tensor or issubclass(type(tensor), nn.Parameter)


def can_be_made_again(tensor: Tensor) -> bool:
    """Tell whether its class and a plain tensor of its values are all that there is to a tensor.

    Not so where it holds tensors of its own, as those with `__torch_dispatch__` do, or attributes,
    or where another process cannot import its class.
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
    """Return a tensor as a plain one with the same values and graph, if that is all it is."""
    if type(tensor) is Tensor or is_plain_class(tensor) or not can_be_made_again(tensor):
        return tensor
    return tensor.as_subclass(Tensor)


def like(tensor: Tensor, model: Tensor) -> Tensor:
    """Return a plain tensor as one of the class of `model`."""
    is_alike = is_plain_class(model) or type(tensor) is type(model)
    return tensor if is_alike else tensor.as_subclass(type(model))


def detached(tensor: Tensor) -> Tensor:
    """Detach a tensor; what comes of it has the same class."""
    if type(tensor) is Tensor or is_plain_class(tensor):
        return tensor.detach()
    plain = as_plain(tensor)
    return tensor.detach() if plain is tensor else like(plain.detach(), tensor)
