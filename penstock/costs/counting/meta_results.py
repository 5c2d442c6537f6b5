"""Run operators on meta tensors, each kind of call once.

On the meta device many operators are computed by torch in Python, to find a shape: what they gave
is remembered, which says all, so that layers that are alike run quickly.
"""

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.costs.records import Operator
from penstock.torch_private import arguments_of, storage_id

_Spec = tuple[torch.Size, tuple[int, ...], torch.dtype]
"""Shape, strides and dtype of a result with memory of its own."""


class Ran(NamedTuple):
    """What an operator gave, and what it was."""

    result: Any
    operators: tuple[Operator, ...]


class _Known(NamedTuple):
    """`specs` are those of the results; None where these are not new tensors only."""

    operators: tuple[Operator, ...]
    specs: Any


class MetaResults:
    """Runs operators; of two with equal arguments the second one only gets results of its own.

    `describe` is asked once what an operator is.
    """

    def __init__(self, describe: Callable[[Any, Any, Any, Any], tuple[Operator, ...]]) -> None:
        self._describe = describe
        self._known: dict[Hashable, _Known] = {}

    def run(self, func: Any, args: Any, kwargs: Any) -> Ran:
        """Run an operator on tensors that are all on the meta device, or have values."""
        key = _key(func, args, kwargs)
        known = None if key is None else self._known.get(key)
        if known is not None:
            if known.specs is None:
                return Ran(func(*args, **kwargs), known.operators)
            return Ran(_made(known.specs), known.operators)
        result = func(*args, **kwargs)
        operators = self._describe(func, args, kwargs, result)
        if key is not None:
            self._known[key] = _Known(operators, _specs(func, args, kwargs, result))
        return Ran(result, operators)


def _key(func: Any, args: Any, kwargs: Any) -> Hashable:
    """Return what tells calls apart; None where that is not known."""
    storages: dict[int, int] = {}
    facts = _fact(args, storages), _fact(tuple(kwargs.items()), storages)
    return (func, facts) if storages and None not in facts else None


def _fact(value: Any, storages: dict[int, int]) -> Hashable:
    """Return what is so of an argument, as a value of its type; None where it cannot be told."""
    if isinstance(value, Tensor):
        if not value.is_meta or value.layout is not torch.strided:
            return None
        storage = storages.setdefault(storage_id(value), len(storages))
        size, offset = value.untyped_storage().nbytes(), value.storage_offset()
        return storage, size, offset, value.shape, value.stride(), value.dtype
    if isinstance(value, tuple | list):
        parts = [_fact(part, storages) for part in value]
        return None if None in parts else (type(value), *parts)
    is_plain = value is None or isinstance(value, _PLAIN)
    return (type(value), value) if is_plain else None


_PLAIN = (bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


def _specs(func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """Describe new tensors, so that others like them can be made; None where some are not new."""
    if any(argument.is_write for argument in arguments_of(func)):
        return None
    given: dict[int, int] = {}
    _fact((args, tuple(kwargs.items())), given)
    parts = result if isinstance(result, tuple | list) else [result]
    specs = [None if part is None else _spec(part, given) for part in parts]
    if not specs or any(s is None and p is not None for s, p in zip(specs, parts, strict=True)):
        return None
    return tuple(specs) if isinstance(result, tuple | list) else specs[0]


def _spec(part: Any, given: dict[int, int]) -> _Spec | None:
    if not isinstance(part, Tensor) or not part.is_meta or part.layout is not torch.strided:
        return None
    spec = part.shape, part.stride(), part.dtype
    same = _made(spec).untyped_storage().nbytes() == part.untyped_storage().nbytes()
    return spec if same and storage_id(part) not in given else None


def _made(specs: Any) -> Any:
    if specs is None:
        return None
    if isinstance(specs[0], torch.Size):
        shape, strides, dtype = specs
        return torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    return tuple(map(_made, specs))
