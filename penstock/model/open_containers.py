"""Open a tuple, list, deque, mapping or dataclass, and rebuild it from new children."""

import copy
import dataclasses
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from penstock.errors import BoundaryError


@dataclass(frozen=True, slots=True)
class DictOf:
    """Rebuilds a dict with these keys."""

    keys: tuple[Any, ...]

    def __call__(self, children: list[Any]) -> dict[Any, Any]:
        return dict(zip(self.keys, children, strict=True))


def opened(value: Any) -> tuple[list[Any], Callable[[list[Any]], Any]] | None:
    """Return a container's children and a function that rebuilds it; None if it is none."""
    kind = type(value)
    if kind is tuple or kind is list:
        return list(value), kind
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return list(value), _with_attributes(value, lambda children: kind(*children))
    if isinstance(value, tuple | list) and not isinstance(value, torch.Size):
        return list(value), _with_attributes(value, kind)
    if isinstance(value, deque):
        most = value.maxlen
        return list(value), _with_attributes(value, lambda children: kind(children, most))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _open_dataclass(value)
    if isinstance(value, Mapping):
        return _open_mapping(value)
    return None


def _with_attributes(value: Any, make: Callable[..., Any]) -> Callable[[list[Any]], Any]:
    """Return a function from children to a container with the attributes of `value`."""
    attributes = dict(getattr(value, "__dict__", ()))
    if not attributes:
        return make

    def rebuild(children: list[Any]) -> Any:
        twin = make(children)
        vars(twin).update(attributes)
        return twin

    return rebuild


def _open_mapping(value: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    keys, kind = list(value), type(value)
    if kind in (dict, MappingProxyType):  # a mapping proxy cannot be copied or sent
        return list(value.values()), DictOf(tuple(keys))

    def filled(children: list[Any]) -> Any:
        twin = copy.copy(value)
        for key, child in zip(keys, children, strict=True):
            before = value[key]
            twin[key] = child
            if value[key] is child is not before:
                value[key] = before
                raise BoundaryError(
                    f"copy.copy() of a {kind.__name__} shares its entries with the original: what "
                    "is put into one micro-batch's would be in all. Give a dict, or give "
                    f"{kind.__name__} a __copy__ that copies the entries"
                )
        return twin

    def rebuild(children: list[Any]) -> Any:
        try:
            return filled(children)
        except Exception:  # its class refuses changes or a copy
            if all(child is value[key] for key, child in zip(keys, children, strict=True)):
                return value  # it is immutable
            raise

    return [value[key] for key in keys], rebuild


def _open_dataclass(value: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    names = [field.name for field in dataclasses.fields(value)]

    def rebuild(children: list[Any]) -> Any:
        twin = copy.copy(value)
        for name, child in zip(names, children, strict=True):
            object.__setattr__(twin, name, child)
            if isinstance(twin, dict) and name in twin:  # some outputs are both
                dict.__setitem__(twin, name, child)
        return twin

    return [getattr(value, name) for name in names], rebuild
