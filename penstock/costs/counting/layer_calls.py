"""Compare layers by classes and settings, and by all facts that decide how they run."""

from collections import OrderedDict
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
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


class OwnNumber:
    """Stands for a layer's own number among equal ones; a layer that reads it may not be equal.

    It can be handed on, and compared to None by `is`.
    """

    def _read(self, *_: Any) -> Any:
        raise ValueError("a layer reads its own number")

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __hash__ = _read
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __rmod__ = _read
    __floordiv__ = __truediv__ = __rtruediv__ = __index__ = __int__ = __float__ = _read
    __str__ = __repr__ = __format__ = _read


class Facts:
    """All that decides how a module runs without values; equal modules have an equal `kind`.

    Attributes that are named in `numbers` do not count.  `is_shown` is False if there is more:
    hooks, or attributes that are no plain values.
    """

    def __init__(
        self,
        module: nn.Module | None,
        own: Collection[int],
        numbers: Collection[str] = (),
        seen: set[int] | None = None,
    ) -> None:
        self._own, self._numbers = own, numbers
        self.is_shown = True
        self.owned: list[Hashable] = []
        """Ids of its modules, containers and memory of tensors, with repetitions."""
        self._seen = set[int]() if seen is None else seen
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
        is_known = is_function and module.partition(".")[0] == torch.__name__
        self.is_shown &= is_known or self._holds_settings(value)
        return kind, id(value)

    def _holds_settings(self, value: Any) -> bool:
        """Tell whether an object has plain values alone, as a model's configuration; layers may
        share it.  An object without attributes may keep state, such as an iterator.
        """
        if callable(value) or not hasattr(value, "__dict__"):
            return False
        if id(value) in self._seen:
            return True
        self._seen.add(id(value))
        settings = Facts(None, (), seen=self._seen)
        for field in fields_of(value).values():
            settings._of(field)
        return settings.is_shown and not any(isinstance(x, tuple) for x in settings.owned)

    def _of_holder(self, value: Any) -> Hashable:
        self.owned.append(("module", id(value)) if isinstance(value, nn.Module) else id(value))
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
            fields = {name: x for name, x in fields.items() if name not in self._numbers}
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


def own_numbers(steps: Sequence[Step]) -> frozenset[str]:
    """Return the names of attributes by which layers of a list know their own places in it."""
    found: dict[str, bool] = {}
    for step in steps:
        places = {int(part) for part in step.name.split(".") if part.isdigit()}
        fields = (vars(part).items() for part in step.module.modules() if places)
        for name, value in chain.from_iterable(fields):
            if type(value) is int:
                found[name] = found.get(name, True) and value in places
    return frozenset(name for name, is_always in found.items() if is_always)


@contextmanager
def without_numbers(modules: Iterable[nn.Module], names: Collection[str]) -> Iterator[None]:
    """Refuse that modules read their own places in a list, from attributes of these names."""
    parts = [part for module in modules for part in module.modules()] if names else []
    lent = [(vars(part), name) for part in parts for name in names if name in vars(part)]
    before = [fields[name] for fields, name in lent]
    try:
        for fields, name in lent:
            fields[name] = OwnNumber()
        yield
    finally:
        for (fields, name), value in zip(lent, before, strict=True):
            fields[name] = value


_CONTAINERS = {list, dict, set, OrderedDict}
"""Classes of containers that may change, so that layers must not share one."""


@dataclass(frozen=True, slots=True)
class _Same:
    """A tensor with values, which equals itself alone."""

    tensor: Tensor

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.tensor is self.tensor

    def __hash__(self) -> int:
        return id(self.tensor)


def facts_of_inputs(step: Step, function: Any) -> Hashable:
    """Return facts that decide how a layer runs on its inputs, which are arguments of a partial
    function; None if there may be others.
    """
    storages: dict[int, int] = {}

    def facts(value: Any) -> Hashable:
        kind = type(value)
        if kind in _PLAIN:
            return kind, value
        if kind in (tuple, list, dict):
            parts = [*map(facts, value.items() if kind is dict else value)]
            return None if None in parts else (kind, *parts)
        memory = memory_facts(value, storages) if kind is Tensor else None
        if memory is None and kind is Tensor and not value.requires_grad:
            return _Same(value)
        if memory is None:
            return None
        return (*memory, value.requires_grad, value.grad_fn and value.grad_fn.name())

    inputs = tuple(value for value in function.args if value is not step.module)
    return facts((inputs, function.keywords))


def memory_facts(tensor: Tensor, storages: dict[int, int]) -> tuple[Hashable, ...] | None:
    """Return the memory of a meta tensor, by a number in `storages`, its shape, strides and dtype.

    They are None for a tensor with values, or without strides.
    """
    if not tensor.is_meta or tensor.layout is not torch.strided:
        return None
    storage = storages.setdefault(storage_id(tensor), len(storages))
    size, offset = tensor.untyped_storage().nbytes(), tensor.storage_offset()
    return storage, size, offset, tensor.shape, tensor.stride(), tensor.dtype
