"""Log the operators that torch runs on meta tensors, in a forward and in the backward of it.

On the meta device many operators are computed by torch in Python, to find a shape: what they gave
is remembered, which says all, so that layers that are alike run quickly.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.torch_private import TorchDispatchMode, arguments_of, next_node_number, storage_id

from .classify import described, dtype_name, tensors_in
from .profile import Operator, Part

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


Edge = tuple[int, int]
"""(number of a node of the graph, place among the gradients that it is given)."""


class NeedsValues(Exception):
    """An operator asks for the values of a tensor that has none."""


class Logged(NamedTuple):
    """An operator of a backward: `key` is the same where it runs again in another backward."""

    key: Hashable
    operator: Operator


class OperatorLog(TorchDispatchMode):
    """Notes what runs: of a forward by layer, of backwards by node.

    `forward[layer]` are the operators while `layer` was set, and `draws` the layers that drew
    random numbers.  Tensors with values that meet meta tensors are taken for such.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.layer, self._is_paused = 0, False
        self._results = MetaResults(described)
        self.forward: dict[int, list[Operator]] = {}
        self.draws: set[int] = set()
        self.marks: list[tuple[int, int]] = []
        self.backward: BackwardLog | None = None

    def begin(self, layer: int) -> None:
        """Note that all that follows is of a layer."""
        self.layer = layer
        self.marks.append((next_node_number(), layer))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Note nothing meanwhile; tensors with values are taken for meta tensors still."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(kind not in _USUAL for kind in types):
            return func(*args, **kwargs)
        if any(tensor.is_meta for tensor in tensors_in((args, kwargs))):
            if torch.Tag.data_dependent_output in func.tags:
                raise NeedsValues(str(func))
            args, kwargs = _as_meta(args), _as_meta(kwargs)
            if kwargs.get("device") is not None:
                kwargs["device"] = torch.device("meta")
            if torch.Tag.dynamic_output_shape in func.tags:
                raise NeedsValues(str(func))
        elif kwargs.get("device") not in (None, torch.device("cpu")):
            kwargs["device"] = torch.device("meta")
        ran = self._results.run(func, args, kwargs)
        if not self._is_paused:
            self._note(func, args, kwargs, ran.operators)
        return ran.result

    def _note(self, func: Any, args: Any, kwargs: Any, operators: Sequence[Operator]) -> None:
        if self.backward is not None:
            self.backward.note(func, operators)
            return
        self.forward.setdefault(self.layer, []).extend(operators)
        if _draws(func, args, kwargs):
            self.draws.add(self.layer)


_USUAL = (Tensor, torch.nn.Parameter)


def _as_meta(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value if value.is_meta else torch.empty_like(value, device="meta")
    if isinstance(value, tuple | list):
        return type(value)(map(_as_meta, value))
    if isinstance(value, dict):
        return {name: _as_meta(part) for name, part in value.items()}
    return value


def _draws(func: Any, args: Any, kwargs: Any) -> bool:
    """Tell whether an operator draws; torch marks attention without dropout, which does not."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    for place, argument in enumerate(arguments_of(func)):
        if argument.name == "dropout_p":
            return bool(args[place] if place < len(args) else kwargs.get("dropout_p", 0.0))
    return True


@dataclass(slots=True)
class BackwardLog:
    """Notes the operators of one backward, by the node of the graph that runs them.

    Where several gradients of one value meet, the engine adds them up; these sums are noted at the
    node that is given the sum.
    """

    edges: Sequence[Sequence[Edge | None]]
    """Where the gradients of each node go."""
    logged: dict[int, list[Logged]] = field(default_factory=dict)
    ran: set[int] = field(default_factory=set)
    arrived: Counter[Edge] = field(default_factory=Counter)
    current: int | None = None

    def note(self, func: Any, operators: Sequence[Operator]) -> None:
        """Note operators of the node that runs now; none runs while the engine adds up."""
        if self.current is None:
            return
        name = str(func.overloadpacket)
        for operator in operators:
            # a norm's backward is one operator, whatever of its gradients is asked for
            key = (name, None if operator.name == "norm" else operator)
            self.logged.setdefault(self.current, []).append(Logged(key, operator))

    def enter(self, node: int, gradients: Any) -> None:
        """Note that a node begins."""
        self.current = node
        self.ran.add(node)

    def leave(self, node: int, gradients: Any, given: Any) -> None:
        """Note that a node has ended, and count where its gradients go."""
        self.current = None
        for edge, gradient in zip(self.edges[node], gradients, strict=False):
            if edge is None or gradient is None:
                continue
            self.arrived[edge] += 1
            if self.arrived[edge] > 1:
                self.logged.setdefault(edge[0], []).append(Logged(("sum", edge), _sum(gradient)))


def _sum(gradient: Tensor) -> Operator:
    """Describe the sum of two gradients."""
    return Operator(
        name="elementwise",
        part=Part.INPUT,
        flops=0,
        num_bytes=3 * gradient.numel() * gradient.element_size(),
        dtype=dtype_name(gradient.dtype),
    )
