"""Run operators on meta tensors, each kind of call once.

On the meta device torch runs many operators in slow Python code to find a shape.  Results of equal
calls are remembered, so that equal layers run quickly.
"""

from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import Tensor

from penstock.costs.records import Operator
from penstock.torch_private import arguments_of, storage_id

from .classify import described

_Spec = tuple[torch.Size, tuple[int, ...], torch.dtype]
"""Shape, strides and dtype of a result in new memory."""


class MetaResults:
    """Runs operators; a second one with equal arguments only gets new results."""

    def __init__(self) -> None:
        self._known: dict[Hashable, tuple[tuple[Operator, ...], Any]] = {}
        """Descriptions of a call, and the specs of its results; None if some are not new."""

    def run(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, tuple[Operator, ...]]:
        """Run an operator on tensors that all are on the meta device, or all have values.

        Returns:
            The result, and the descriptions of the operator.
        """
        storages: dict[int, int] = {}
        facts = _fact(args, storages), _fact(tuple(kwargs.items()), storages)
        is_known = bool(storages) and None not in facts
        if is_known and (func, facts) in self._known:
            operators, specs = self._known[func, facts]
            return func(*args, **kwargs) if specs is None else _made(specs), operators
        result = func(*args, **kwargs)
        operators = described(func, args, kwargs, result)
        if is_known:
            self._known[func, facts] = operators, _specs(func, storages, result)
        return result, operators


def _fact(value: Any, storages: dict[int, int]) -> Hashable:
    """Return facts about an argument that decide the result; None if there may be others."""
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


def _specs(func: Any, storages: Mapping[int, int], result: Any) -> Any:
    """Return specs from which `_made` makes equal results; None if one shares `storages`."""
    if any(argument.is_write for argument in arguments_of(func)):
        return None
    parts = result if isinstance(result, tuple | list) else [result]
    specs = [None if part is None else _spec(part, storages) for part in parts]
    if not specs or any(s is None and p is not None for s, p in zip(specs, parts, strict=True)):
        return None
    return tuple(specs) if isinstance(result, tuple | list) else specs[0]


def _spec(part: Any, storages: Mapping[int, int]) -> _Spec | None:
    if not isinstance(part, Tensor) or not part.is_meta or part.layout is not torch.strided:
        return None
    spec = part.shape, part.stride(), part.dtype
    same = _made(spec).untyped_storage().nbytes() == part.untyped_storage().nbytes()
    return spec if same and storage_id(part) not in storages else None


def _made(specs: Any) -> Any:
    if specs is None:
        return None
    if isinstance(specs[0], torch.Size):
        shape, strides, dtype = specs
        return torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    return tuple(map(_made, specs))
