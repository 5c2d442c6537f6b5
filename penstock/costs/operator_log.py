"""Log the operators that torch runs on meta tensors, in a forward and in the backward of it."""

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.torch_private import TorchDispatchMode, arguments_of, next_node_number

from .classify import described, dtype_name, tensors_in
from .meta_results import MetaResults
from .operators import Operator, Part

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
