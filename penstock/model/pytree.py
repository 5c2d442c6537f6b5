"""Values at a boundary: nested tuples, lists, deques, dicts and dataclasses of tensors.

Everything else (None, numbers, strings, a user's objects) is a constant: it stays in the structure
and is sent unchanged.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from numbers import Number
from typing import Any, TypeVar

import torch
from torch import Tensor

from .open_containers import opened

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Leaf:
    """The place of tensor number `index`; a tensor at two places has one number."""

    index: int


@dataclass(frozen=True, slots=True)
class Constant:
    """A value without tensors."""

    value: Any


@dataclass(frozen=True, slots=True)
class Node:
    """A container: `rebuild` makes it again from new children."""

    rebuild: Callable[[list[Any]], Any]
    children: tuple["Structure", ...]


class Sealed:
    """Base of objects that cross stages unchanged and hold no tensor."""


Structure = Leaf | Constant | Node


ONE_TENSOR = Node(tuple, (Leaf(0),))
"""The structure of a tuple of one tensor, the most common value between stages."""


def flatten(value: Any) -> tuple[list[Tensor], Structure]:
    """Split a value into its distinct tensors, in order, and their structure."""
    if isinstance(value, Tensor):
        return [value], Leaf(0)
    if type(value) is tuple and len(value) == 1 and isinstance(value[0], Tensor):
        return list(value), ONE_TENSOR
    leaves: list[Tensor] = []
    return leaves, _flatten(value, leaves, {}, _is_tensor)


def flatten_by(value: Any, is_leaf: Callable[[Any], bool]) -> tuple[list[Any], Structure]:
    """Split a value as `flatten` does, with further leaves for which `is_leaf` is true."""
    if isinstance(value, Tensor):
        return [value], Leaf(0)
    leaves: list[Any] = []
    return leaves, _flatten(value, leaves, {}, lambda v: _is_tensor(v) or is_leaf(v))


def unflatten(structure: Structure, leaves: list[Any]) -> Any:
    """Put leaves (tensors or their stand-ins) back into their structure."""
    if structure is ONE_TENSOR:
        return (leaves[0],)
    match structure:
        case Leaf(index):
            return leaves[index]
        case Constant(value):
            return value
        case Node(rebuild, children):
            return rebuild([unflatten(child, leaves) for child in children])


def constants(structure: Structure) -> Iterator[Any]:
    """Yield the values in a structure that are no tensors."""
    match structure:
        case Constant(value):
            yield value
        case Node(_, children):
            for child in children:
                yield from constants(child)
        case Leaf():
            return


def tree_map(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Replace every tensor in a value by `function(tensor)`."""
    leaves, structure = flatten(value)
    return unflatten(structure, [function(leaf) for leaf in leaves])


def with_new_containers(value: _T) -> _T:
    """Return a value with the same tensors in new containers."""
    leaves, structure = flatten(value)
    new: _T = unflatten(structure, leaves)
    return new


PLAIN_TYPES = (
    *(type(None), bool, int, float, complex, str, bytes, Enum, slice, range, Number, Sealed),
    *(torch.Size, torch.dtype, torch.device, torch.layout, torch.memory_format),
)


def opaque_values(structure: Structure) -> Iterator[Any]:
    """Yield the constants that could hold a tensor: all except plain values."""
    return (value for value in constants(structure) if not isinstance(value, PLAIN_TYPES))


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _flatten(
    value: Any, leaves: list[Any], seen: dict[int, int], is_leaf: Callable[[Any], bool]
) -> Structure:
    if is_leaf(value):
        index = seen.setdefault(id(value), len(leaves))
        if index == len(leaves):
            leaves.append(value)
        return Leaf(index)
    if isinstance(value, Leaf):
        return value
    parts = opened(value)
    if parts is None:
        return Constant(value)
    children, rebuild = parts
    return Node(rebuild, tuple(_flatten(child, leaves, seen, is_leaf) for child in children))
