"""The forward of a model as a graph: calls of torch's functions, and the tensors between them.

    x ──► linear ──► gelu ──► linear ──► add ──► layer_norm     each call has the operators that
          w, b                w, b       ▲       w, b           torch ran for it, forward and
    x ───────────────────────────────────┘                      backward, and what it saves

A profile has sums over the graph; sharding needs its edges.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import sha256
from typing import Any, NamedTuple

from penstock.costs.records import Operator


class Value(NamedTuple):
    """A value that calls take."""

    number: int
    """Number of its tensor."""
    maker: int
    """The layer that makes it; -1 for an input."""
    users: tuple[int, ...]
    """The layers that use it."""
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Ref:
    """The place of tensor number `tensor` among the arguments of a call."""

    tensor: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """A tensor of the graph."""

    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    wants_gradient: bool
    maker: int | None = None
    """The call that made it; None for inputs of the model, parameters and buffers."""
    name: str = ""
    """Name of a parameter or buffer in the model; "" for all others."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of a function of torch, made by a layer."""

    layer: int
    function: str = ""
    """Full name, such as "torch.nn.functional.linear"; "" for code in C++ or custom autograd."""
    arguments: tuple[Any, ...] = ()
    """Positional arguments, with a `Ref` for each tensor."""
    options: tuple[tuple[str, Any], ...] = ()
    """Keyword arguments, by name."""
    gives: tuple[int, ...] = ()
    """Numbers of the tensors of its result; an argument that is returned has a new number."""
    changes: tuple[int, ...] = ()
    """Numbers of the arguments that it changes in place."""
    operators: tuple[Operator, ...] = ()
    """Operators that torch ran for it, forward and backward."""
    saved: tuple[int, ...] = ()
    """Numbers of the tensors that it saves for its backward."""
    inner_bytes: int = 0
    """Bytes of all else that it saves."""
    draws: bool = False
    """True if it draws random numbers."""
    is_between: bool = False
    """True for calls before or after the layer's own call: of the code between blocks."""

    @cached_property
    def takes(self) -> tuple[int, ...]:
        """Numbers of its tensor arguments, each once, in order of first sight."""
        return tuple(dict.fromkeys(self.uses))

    @cached_property
    def uses(self) -> tuple[int, ...]:
        """Numbers of its tensor arguments, with repetitions."""
        return tuple(_refs((self.arguments, self.options)))

    def argument(self, place: int, name: str, default: Any = None) -> Any:
        """Return an argument that may be given by its place or by its name."""
        if place < len(self.arguments):
            return self.arguments[place]
        return dict(self.options).get(name, default)


@dataclass(frozen=True)
class Graph:
    """All calls of one forward, in order, and all tensors by number."""

    tensors: tuple[TensorSpec, ...]
    calls: tuple[Call, ...]
    outputs: tuple[int, ...] = ()
    """Numbers of the model's outputs."""
    entering: Mapping[int, frozenset[int]] = field(default_factory=dict)
    """Numbers of a layer's arguments, by layer, if they were seen."""

    def of_layer(self, layer: int) -> list[Call]:
        """Return the calls of one layer, in order."""
        return self._by_layer.get(layer, [])

    @cached_property
    def num_uses(self) -> Counter[int]:
        """Numbers of calls that take each tensor, by its number."""
        return Counter(n for call in self.calls for n in call.takes)

    @cached_property
    def values(self) -> tuple[Value, ...]:
        """Arguments of calls that are no parameters or buffers, in order of first sight."""
        users: dict[int, dict[int, None]] = {}
        for call in self.calls:
            for n in call.takes:
                users.setdefault(n, {})[call.layer] = None
        values = []
        for n, used in users.items():
            spec = self.tensors[n]
            if not spec.name:
                maker = -1 if spec.maker is None else self.calls[spec.maker].layer
                values.append(Value(n, maker, tuple(used), spec.num_bytes))
        return tuple(values)

    @cached_property
    def _by_layer(self) -> dict[int, list[Call]]:
        by_layer: dict[int, list[Call]] = {}
        for call in self.calls:
            by_layer.setdefault(call.layer, []).append(call)
        return by_layer

    def signature(self, layer: int) -> str:
        """Return a text that is equal for layers with the same calls on tensors of the same sizes.

        Names of parameters and the numbers of tensors do not count.
        """
        if layer in self._signatures:
            return self._signatures[layer]
        numbers: dict[int, int] = {}
        facts = []
        for call in self.of_layer(layer):
            numbers_of_call = (*call.takes, *call.gives)
            for tensor in numbers_of_call:
                numbers.setdefault(tensor, len(numbers))
            specs = [
                (numbers[t], replace(spec, maker=None, name="named" * bool(spec.name)))
                for t, spec in ((t, self.tensors[t]) for t in numbers_of_call)
            ]
            arguments = _renumbered((call.arguments, call.options), numbers)
            facts.append((call.function, arguments, specs))
        self._signatures[layer] = sha256(repr(facts).encode()).hexdigest()[:16]
        return self._signatures[layer]

    @cached_property
    def _signatures(self) -> dict[int, str]:
        return {}


def _refs(value: Any) -> Iterator[int]:
    if isinstance(value, Ref):
        yield value.tensor
    elif isinstance(value, tuple):
        for part in value:
            yield from _refs(part)


def _renumbered(value: Any, numbers: dict[int, int]) -> Any:
    if isinstance(value, Ref):
        return Ref(numbers[value.tensor])
    if isinstance(value, tuple):
        return tuple(_renumbered(part, numbers) for part in value)
    return value


@dataclass(frozen=True, eq=False, slots=True)
class Operators:
    """The operators of a model, for micro-batches of any size."""

    names: tuple[str, ...]
    """Names of the layers."""
    graph_of: Callable[[int], Graph]
    """Records the graph of a micro-batch of so many samples."""
