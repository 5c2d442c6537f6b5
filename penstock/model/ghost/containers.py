"""Lists, dicts and dataclasses that are given to a block: has it changed them?"""

import dataclasses
from collections import deque
from collections.abc import Iterator, Mapping, Set
from typing import Any

from torch import Tensor, nn

SIMPLE = frozenset((type(None), bool, int, float, str, Tensor, nn.Parameter))
"""What is no container."""


def changes(value: Any) -> bool:
    """Tell whether a value is a container that can be changed, or may hold one."""
    return isinstance(value, list | tuple | deque | dict | Mapping | Set) or _is_record(value)


def contents(value: Any) -> list[Any]:
    """List what is in a container, and in those in it, so that any change shows."""
    return list(_contents(value))


def _contents(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        yield from map(str, value)
        parts = list(value.values())
    elif _is_record(value):
        parts = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    elif isinstance(value, list | tuple | deque | Set):
        parts = list(value)
    else:
        yield id(value) if not isinstance(value, bool | int | float | str) else value
        return
    yield len(parts)
    for part in parts:
        yield from _contents(part)


def _is_record(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)
