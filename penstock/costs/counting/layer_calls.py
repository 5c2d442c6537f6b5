"""Compare layers by classes and settings, and by all facts that decide how they run."""

from collections import OrderedDict
from collections.abc import Collection, Hashable
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from penstock.model.capture.watch import original_class
from penstock.model.kept import UNCOUNTED, fields_of
from penstock.model.stage_plan import Step
from penstock.torch_private import NEVER_COMPUTES, storage_id

_OWN_PLACE = "its place in a list"
"""Stands for a layer's own number among its attributes."""


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


# -- layers that run alike ------------------------------------------------------------------------

_PLAIN = {
    *(bool, int, float, complex, str, bytes, type(None), type(...)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
}
"""Classes whose objects are equal if they compare equal, and never change."""


class Facts:
    """All that decides how a module runs without values; equal modules have an equal `kind`.

    `is_shown` is False if there is more: hooks, or attributes that are no plain values.
    """

    def __init__(self, module: nn.Module, own: Collection[int]) -> None:
        self._own = own
        self.is_shown = True
        self.owned: list[Hashable] = []
        """Ids of its modules, containers and memory of tensors, with repetitions."""
        self._seen: set[int] = set()
        self.kind = self._of(module)

    def _of(self, value: Any) -> Hashable:
        kind = type(value)
        if kind in _PLAIN:
            return kind, value
        if isinstance(value, Tensor):
            return self._of_tensor(value)
        if isinstance(value, nn.Module) or kind in _CONTAINERS:
            return self._of_holder(value)
        if kind is tuple or kind is torch.Size:
            return kind, tuple(map(self._of, value))
        module = getattr(value, "__module__", None) or ""
        is_function = isinstance(value, FunctionType | BuiltinFunctionType)
        self.is_shown &= is_function and module.partition(".")[0] == torch.__name__
        return kind, id(value)

    def _of_holder(self, value: Any) -> Hashable:
        self.owned.append(id(value))
        if id(value) in self._seen:
            return None
        self._seen.add(id(value))
        if isinstance(value, set):
            self.is_shown &= all(type(entry) in _PLAIN for entry in value)
            return set, frozenset((type(entry), entry) for entry in value)
        if isinstance(value, list):
            return list, tuple(map(self._of, value))
        fields = value
        if isinstance(value, nn.Module):
            fields = fields_of(value)
            self.is_shown &= not any(fields.get(name) for name in UNCOUNTED)
        return type(value), tuple((self._of(key), self._of(x)) for key, x in fields.items())

    def _of_tensor(self, tensor: Tensor) -> Hashable:
        is_usual = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
        self.is_shown &= is_usual
        if not is_usual:
            return id(tensor)
        self.owned.append(("memory", storage_id(tensor)))
        is_number = not tensor.dim() and tensor.dtype is torch.long and not tensor.is_meta
        return (
            *(type(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.is_meta),
            *(tensor.requires_grad, id(tensor) in self._own),
            int(tensor) if is_number else None,  # the only values that a count keeps
        )


_CONTAINERS = {list, dict, set, OrderedDict}
"""Classes of containers that may change, so that layers must not share one."""


def facts_of_inputs(inputs: Any) -> Hashable:
    """Return facts that decide how a layer runs on its inputs; None if there may be others."""
    storages: dict[int, int] = {}

    def facts(value: Any) -> Hashable:
        kind = type(value)
        if kind in _PLAIN:
            return kind, value
        if kind in (tuple, list, dict):
            parts = [*map(facts, value.items() if kind is dict else value)]
            return None if None in parts else (kind, *parts)
        memory = memory_facts(value, storages) if kind is Tensor else None
        if memory is None:
            return None
        return (*memory, value.requires_grad, value.grad_fn and value.grad_fn.name())

    return facts(inputs)


def memory_facts(tensor: Tensor, storages: dict[int, int]) -> tuple[Hashable, ...] | None:
    """Return the memory of a meta tensor, by a number in `storages`, its shape, strides and dtype.

    They are None for a tensor with values, or without strides.
    """
    if not tensor.is_meta or tensor.layout is not torch.strided:
        return None
    storage = storages.setdefault(storage_id(tensor), len(storages))
    size, offset = tensor.untyped_storage().nbytes(), tensor.storage_offset()
    return storage, size, offset, tensor.shape, tensor.stride(), tensor.dtype
