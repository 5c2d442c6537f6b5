"""Compare layers by classes and settings; unpack saved tensors unchanged."""

from collections.abc import Hashable
from types import FunctionType
from typing import Any

from torch import Tensor, nn

from penstock.model.capture.watch import original_class
from penstock.model.stage_plan import Step
from penstock.torch_private import NEVER_COMPUTES

_OWN_PLACE = "its place in a list"
"""Stands for a layer's own number among its attributes."""


Classes = tuple[type, ...]
"""Classes of a module and of its submodules, in order."""


def classes_of(module: nn.Module) -> Classes:
    """Return the classes of a module and its submodules: their Python takes unrecorded time."""
    return tuple(original_class(part) for part in module.modules())


def kind_of(step: Step, arguments: Any) -> Hashable:
    """Return a value that is equal for layers of the same classes, sizes, settings and inputs.

    A layer's own number in a list does not count, nor a rate of dropout above 0.  Objects of other
    classes count by their class only.
    """
    places = frozenset(int(part) for part in step.name.split(".") if part.isdigit())
    parts = tuple(
        (
            path,
            original_class(part),
            tuple((name, _setting(name, value, places)) for name, value in vars(part).items()),
        )
        for path, part in step.module.named_modules()
    )
    return parts, _fact(arguments)


def _setting(name: str, value: Any, places: frozenset[int]) -> Hashable:
    if name.endswith("hooks"):
        return len(value)
    if type(value) is int and value in places:
        return _OWN_PLACE
    if isinstance(value, float) and (name == "p" or "drop" in name):
        return bool(value)
    return _fact(value)


def _fact(value: Any) -> Hashable:
    match value:
        case Tensor():
            return tuple(value.shape), value.dtype, value.device, value.requires_grad
        case bool() | int() | float() | str() | None | FunctionType():
            return value
        case tuple() | list():
            return tuple(map(_fact, value))
        case dict():
            return tuple((str(key), _fact(entry)) for key, entry in value.items())
        case _:
            return id(type(value))


def as_it_is(tensor: Tensor) -> Tensor:
    """Return a saved tensor unchanged."""
    return tensor


setattr(as_it_is, NEVER_COMPUTES, True)
