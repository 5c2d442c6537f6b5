"""Encode values of classes of the user's: dataclasses, named tuples, enums, containers, numbers.

A value goes as the name of its class and what it holds.  The class must stand at the top of a
module, or in a class there, that the other process has imported too: nothing is imported or called
on the word of a message, neither `__init__` nor `__setstate__`.
"""

import dataclasses
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Mapping
from decimal import Decimal
from enum import Enum, Flag
from fractions import Fraction
from functools import lru_cache, partial
from operator import attrgetter
from typing import Any

import numpy
from torch import Tensor

from penstock.errors import BoundaryError
from penstock.model.pytree import Leaf

from .plain_data import Codec, Kind, record

_FIXED = (str, int, float, complex)
_BASES = (OrderedDict, defaultdict, dict, list, deque, tuple, *_FIXED)
"""What a value is made by, if its class is one of these or comes of one."""
_FACTORIES = {kind.__name__: kind for kind in (list, dict, set, tuple, str, int, float)}
"""What may make the missing values of a `defaultdict`."""


def user_codec(kinds: Iterable[Kind] = (), fallback: Kind | None = None) -> Codec:
    """Return a codec that knows `kinds`, and the user's classes; `fallback` is told for others."""
    return Codec(
        (*_BUILT_IN, *kinds, *([fallback] if fallback is not None else [])),
        others=lambda kind: _kind_of(kind) or fallback,
        find=_find,
    )


def class_name(kind: type) -> str:
    """Return a class's name in messages."""
    return f"{kind.__module__}:{kind.__qualname__}"


def _find(name: str) -> type | None:
    """Return the class of that name, if it is here."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = vars(found).get(part) if hasattr(found, "__dict__") else None
    return found if isinstance(found, type) and class_name(found) == name else None


def tensor_class(name: str) -> type[Tensor]:
    """Return the class of tensors that is called so in messages.

    Raises:
        ValueError: it is not here, or no class of tensors.
    """
    found = _find(name)
    if found is None or not issubclass(found, Tensor):
        raise ValueError(f"{name!r} is no class of tensors here")
    return found


@lru_cache(maxsize=1024)
def _kind_of(kind: type) -> Kind | None:
    """Say how values of a class are told; None if they are not."""
    name = class_name(kind)
    if (
        hasattr(kind, "__del__")
        or issubclass(kind, Tensor)
        or kind in _FIXED
        or _find(name) is not kind
    ):
        return None
    if issubclass(kind, Flag):  # several at once have no name of their own
        return Kind(name, kind, attrgetter("value"), kind)
    if issubclass(kind, Enum):
        return Kind(name, kind, attrgetter("name"), kind.__members__.__getitem__)
    if issubclass(kind, (*_BASES, Mapping)) or dataclasses.is_dataclass(kind):
        return Kind(name, kind, _parts, partial(_make, kind))
    return None


def _parts(value: Any) -> tuple[Any, dict[str, Any]]:
    """Return what a container holds, and the attributes of a value."""
    held: Any = None
    if isinstance(value, defaultdict):
        held = (_factory_name(value), dict(value))
    elif isinstance(value, dict):
        held = dict(value)
    elif isinstance(value, deque):
        held = (list(value), value.maxlen)
    elif isinstance(value, tuple | list):
        held = list(value)
    elif isinstance(value, _FIXED):
        base: Any = next(base for base in _FIXED if isinstance(value, base))
        held = base.__getnewargs__(value)
    attributes = dict(getattr(value, "__dict__", ()))
    if dataclasses.is_dataclass(value):
        names = [f.name for f in dataclasses.fields(value) if hasattr(value, f.name)]
        attributes |= {name: getattr(value, name) for name in names}
    return held, attributes


def _factory_name(value: "defaultdict[Any, Any]") -> str:
    factory = value.default_factory
    if factory is None:
        return ""
    name: str = getattr(factory, "__name__", "")
    if _FACTORIES.get(name) is not factory:
        raise BoundaryError(
            f"a defaultdict of {factory!r} cannot be told to another process: only those of "
            f"{', '.join(_FACTORIES)} can, and nothing is unpickled; give dict(it)"
        )
    return name


def _make(kind: type, told: tuple[Any, dict[str, Any]]) -> Any:
    held, attributes = told
    base: Any = next((base for base in _BASES if issubclass(kind, base)), object)
    twin: Any
    if base is tuple:
        is_structseq = hasattr(kind, "n_sequence_fields")  # of torch: only its own `__new__` works
        twin = (kind if is_structseq else tuple).__new__(kind, held)
    else:
        twin = base.__new__(kind, *(held if base in _FIXED else ()))
    if base is list:
        list.extend(twin, held)
    elif base is deque:
        deque.__init__(twin, *held)
    elif base is defaultdict:
        factory, items = held
        defaultdict.__init__(twin, _FACTORIES[factory] if factory else None, items)
    elif base in (dict, OrderedDict):
        for key, item in held.items():
            base.__setitem__(twin, key, item)
    for name, item in attributes.items():
        object.__setattr__(twin, name, item)
    return twin


def _array_parts(array: Any) -> tuple[str, tuple[int, ...], bytes]:
    if array.dtype.hasobject or numpy.dtype(array.dtype.str) != array.dtype:
        raise BoundaryError(
            f"an array of {array.dtype} cannot be told to another process: only numbers and texts "
            "of a fixed size can, and nothing is unpickled"
        )
    return array.dtype.str, array.shape, array.tobytes()


def _array(told: tuple[str, tuple[int, ...], bytes]) -> Any:
    kind, shape, content = told
    return numpy.frombuffer(content, kind).reshape(shape).copy()


def _number(told: tuple[str, tuple[int, ...], bytes]) -> Any:
    return _array(told)[()]


_NUMBERS = {numpy.dtype(letter).type for letter in numpy.typecodes["All"] if letter not in "OVmM"}
_BUILT_IN = (
    Kind("slice", slice, lambda s: (s.start, s.stop, s.step), lambda parts: slice(*parts)),
    Kind("range", range, lambda r: (r.start, r.stop, r.step), lambda parts: range(*parts)),
    Kind("ellipsis", type(...), lambda _: None, lambda _: ...),
    Kind("Fraction", Fraction, str, Fraction),
    Kind("Decimal", Decimal, str, Decimal),
    Kind("ndarray", numpy.ndarray, _array_parts, _array),
    *(Kind(number.__name__, number, _array_parts, _number) for number in _NUMBERS),
    record(Leaf),
)
