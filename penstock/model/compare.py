"""Compare two values at a boundary, and find their first difference."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy
from torch import Tensor

from .open_containers import opened
from .pytree import PLAIN_TYPES, Constant, Leaf, Node, Sealed, Structure


def is_same(one: Structure, other: Structure) -> bool:
    """Tell whether two structures rebuild equal values, as far as that can be known."""
    match one, other:
        case Leaf(), Leaf():
            return one == other
        case Constant(a), Constant(b):
            return a is b or is_same_plain(a, b)
        case Node(), Node():
            return one.rebuild == other.rebuild and (
                len(one.children) == len(other.children)
                and all(map(is_same, one.children, other.children))
            )
        case _:
            return False


def is_same_plain(one: Any, other: Any) -> bool:
    """Tell whether two values are the same number or string; 0.0 and -0.0 differ."""
    if type(one) is not type(other) or not isinstance(one, _COMPARED):
        return False
    return bool(one == other and (one or repr(one) == repr(other)))


_COMPARED = (bool, int, float, str)


def first_difference(one: Any, other: Any, path: str = "") -> tuple[str, Any, Any] | None:
    """Return the first difference in structure or in a plain constant: the path and both sides.

    Objects of the user's classes are not compared.
    """
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return None
    parts, other_parts = opened(one), opened(other)
    if parts is None or other_parts is None:
        return None if _is_same_constant(one, other) else (path, one, other)
    names, other_names = _places(one), _places(other)
    if type(one) is not type(other) or names != other_names:
        return path, one, other
    for name, child, twin in zip(names, parts[0], other_parts[0], strict=True):
        difference = first_difference(child, twin, path + name)
        if difference is not None:
            return difference
    return None


def leaf_paths(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor in a value with its path, such as "[0].hidden"."""
    if isinstance(value, Tensor):
        yield path, value
    elif (parts := opened(value)) is not None:
        for name, child in zip(_places(value), parts[0], strict=True):
            yield from leaf_paths(child, path + name)


def _is_same_constant(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, Sealed) or is_object(one):
        return True  # two objects are refused later, when one is used
    if isinstance(one, numpy.ndarray):
        return numpy.array_equal(one, other)
    try:
        return bool(one == other) or bool(one != one and other != other)  # a NaN is equal here
    except (TypeError, ValueError, RuntimeError):  # their comparison has no truth value
        return False


def _places(container: Any) -> list[str]:
    """Return the path of each child of a container, such as ".hidden" or "[0]"."""
    if dataclasses.is_dataclass(container):
        return [f".{field.name}" for field in dataclasses.fields(container)]
    if isinstance(container, Mapping):
        return [f"[{key!r}]" for key in container]
    return [f"[{n}]" for n in range(len(container))]


def is_object(value: Any) -> bool:
    """Tell whether a value is a user's object, and no tensor, container or plain value."""
    is_plain_value = isinstance(value, (Tensor, numpy.ndarray, *PLAIN_TYPES))
    return not is_plain_value and opened(value) is None
