"""Names of the operations of a forward and of their values, and descriptions of tensors."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

from penstock.errors import CutError
from penstock.model.compare import is_same
from penstock.model.pytree import Constant, Leaf, Node, Sealed, Structure, opaque_values
from penstock.model.templates import StandIn, from_template, template


class EventKey(NamedTuple):
    """The name of an operation of the model's forward: the block call before it, and a number.

    `number` 0 is that call itself, n the nth operation after it.  Operations before all calls
    count from `START`.
    """

    block: str
    call: int
    number: int

    def __str__(self) -> str:
        if self.number < 0:
            return "the model"
        if self.block.startswith(INPUT):
            return f"the input '{self.block.removeprefix(INPUT)}'"
        if self.block == START.block:
            place = "the start"
        else:
            place = f"'{self.block}'" + (f" (call {self.call + 1})" if self.call else "")
        return place if self.number == 0 else f"operation {self.number} after {place}"


INPUT = "?"
"""Prefix of the block name of an argument of the model."""
START = EventKey("", 0, 0)
"""The event that gives the model's inputs, if they are routed."""
END = EventKey("", 0, -1)
"""The event that uses the model's outputs."""


def name_of(block: str, call: int) -> str:
    """Return the name of a block call: its block, and the number of the call after the first."""
    return f"{block} (call {call + 1})" if call else block


class Operation(NamedTuple):
    """An operation before it runs: a call of a block, or an operation between blocks."""

    key: EventKey
    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class ValueId(NamedTuple):
    """The name of a tensor: its operation, and its place among the tensors of the result.

    A negative place, -1 - i, is argument number i after the operation changed it in place.
    """

    event: EventKey
    place: int

    def __str__(self) -> str:
        if self.event.block.startswith(INPUT) and self.place == 0:
            return str(self.event)
        if self.place < 0:
            return f"argument {-1 - self.place} changed by {self.event}"
        return f"output {self.place} of {self.event}" if self.place else f"output of {self.event}"


_STRIDED = torch.strided


class Info(NamedTuple):
    """A tensor without its values; `strides` is None if the layout has none."""

    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    value: ValueId

    @classmethod
    def of(cls, tensor: Tensor, value: ValueId, device: torch.device | None = None) -> "Info":
        """Describe a tensor; `device` replaces the meta device."""
        where = device if device is not None and tensor.is_meta else tensor.device
        strides = tensor.stride() if tensor.layout is _STRIDED else None
        return cls(tuple(tensor.shape), strides, tensor.dtype, where, tensor.requires_grad, value)

    def fits(self, tensor: Tensor) -> bool:
        """Tell whether this describes a tensor."""
        shape, strides, dtype, device, requires_grad, _ = self
        return (
            tensor.shape == shape
            and tensor.requires_grad is requires_grad
            and tensor.dtype is dtype
            and tensor.layout is _STRIDED
            and tensor.stride() == strides
            and tensor.device == device
        )

    @property
    def num_bytes(self) -> int:
        """Size of the tensor in bytes."""
        return prod(self.shape) * self.dtype.itemsize


class Told(NamedTuple):
    """The result of an operation without the tensors' values, for other stages.

    `structure` has a place for each of `infos`.  `changed` has the arguments that were changed in
    place, by their number among the routed ones.
    """

    name: str
    structure: Structure
    infos: tuple[Info, ...]
    changed: tuple[tuple[int, Info], ...]

    def __reduce__(self) -> Any:
        return Told.of_parts, (self.name, template(self.structure), self.infos, self.changed)

    @classmethod
    def of_parts(
        cls, name: str, form: Any, infos: tuple[Info, ...], changed: tuple[tuple[int, Info], ...]
    ) -> "Told":
        """Rebuild a `Told` from a template of its structure."""
        return cls(name, told_structure(from_template(form), START), infos, changed)


class LeftBehind(StandIn):
    """Stands on later stages for an object that cannot be sent; any use is a CutError (E7)."""

    def __init__(self, kind: str, maker: EventKey) -> None:
        self.__dict__.update(kind=kind, maker=maker)

    def _error(self) -> CutError:
        where = f"{self.maker} gave a {self.kind}, which a later stage uses"
        if self.maker == END:
            where = f"the model's output holds a {self.kind}, of which each stage has a part only"
        return CutError(
            f"{where}; only tensors, numbers, None, and tuples, lists, dicts and dataclasses of "
            "them cross stages. Switch it off (use_cache=False, say), or keep its users on one "
            "stage"
        )


def left_behind(structure: Structure) -> Iterator[str]:
    """Yield the class names of the objects that a told structure lacks."""
    if isinstance(structure, Node):
        for part in structure.children:
            yield from left_behind(part)
    elif isinstance(structure, Constant) and isinstance(structure.value, LeftBehind):
        yield structure.value.__dict__["kind"]


def told_structure(structure: Structure, maker: EventKey) -> Structure:
    """Return the structure of a result for other stages, without opaque objects."""
    if isinstance(structure, Leaf) or not any(True for _ in opaque_values(structure)):
        return structure
    if isinstance(structure, Node):
        parts = tuple(told_structure(part, maker) for part in structure.children)
        return Node(structure.rebuild, parts)
    if isinstance(structure.value, numpy.ndarray) and not structure.value.dtype.hasobject:
        return Node(partial(_array, structure.value.copy()), ())
    return Constant(LeftBehind(type(structure.value).__name__, maker))


def _array(array: "numpy.ndarray[Any, Any]", _nothing: list[Any]) -> Any:
    """Copy an array, as each stage may write into it."""
    return array.copy()


Header = dict[EventKey, Told]
"""The results of all operations on the stages before."""


_MOST_HEADERS = 64
"""Most headers that a stage caches; if sizes change with each batch, it clears the cache."""


class SealedHeader(Sealed):
    """A header as it is sent; equal micro-batches share one object."""

    def __init__(self, header: Header) -> None:
        self.header = header


@dataclass(slots=True)
class HeaderCache:
    """The results that a stage has sent before, so that equal ones are the same object.

    `told` has the newest result of each event.  `one_new` has those with exactly one tensor, a new
    one, and no argument changed in place.
    """

    told: dict[EventKey, Told] = field(default_factory=dict)
    one_new: dict[EventKey, Told] = field(default_factory=dict)
    headers: dict[tuple[int, ...], SealedHeader] = field(default_factory=dict)

    def same(self, key: EventKey, told: Told) -> Told:
        """Return the result of an event, as the same object as before if it is equal."""
        before = self.told.get(key)
        if (
            before is not None
            and (before.name, before.infos, before.changed)
            == (told.name, told.infos, told.changed)
            and is_same(before.structure, told.structure)
        ):
            return before
        self.told[key] = told
        if type(told.structure) is Leaf and not told.changed and told.infos[0].value.event == key:
            self.one_new[key] = told
        else:
            self.one_new.pop(key, None)
        return told

    def sealed(self, header: Header) -> SealedHeader:
        """Return a header to send: the same object for the same events."""
        sealed = self.headers.get(key := tuple(map(id, header.values())))
        if sealed is None:
            if len(self.headers) == _MOST_HEADERS:
                self.headers.clear()
            sealed = self.headers[key] = SealedHeader(header)
        return sealed
