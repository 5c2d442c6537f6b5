"""Run the backward of a recorded forward, and assign its operators to calls and parts.

calls   layer_norm ──► linear ──► gelu      forward: nodes get rising numbers
nodes      1, 2          3, 4       5       marks say which numbers are of which call
            ▲─────────────▲─────────┘       backward: hooks log the operators of each node
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node, get_gradient_edge

from penstock.costs.records import Operator, Part
from penstock.torch_private import node_number

from .classify import dtype_name
from .recorder import Recorder

_LEAF = "torch::autograd::AccumulateGrad"
Edge = tuple[int, int]
"""(number of a node of the graph, place among the gradients it receives)."""


class Logged(NamedTuple):
    """An operator of a backward; `key` is equal for the same operator in another backward."""

    key: Hashable
    operator: Operator


@dataclass(slots=True)
class BackwardLog:
    """Notes the operators of one backward, by the node of the graph that runs them.

    The engine adds up several gradients of one value.  These sums are noted at the node that
    receives the sum.
    """

    edges: Sequence[Sequence[Edge | None]]
    """Edges that the gradients of a node take, by node."""
    logged: dict[int, list[Logged]] = field(default_factory=dict)
    ran: set[int] = field(default_factory=set)
    arrived: Counter[Edge] = field(default_factory=Counter)
    given: list[tuple[int, Hashable]] = field(default_factory=list)
    """Nodes that ran, each with shapes, strides and dtypes of the gradients it was given."""
    current: int | None = None

    def note(self, func: Any, operators: Sequence[Operator]) -> None:
        """Note operators of the node that runs; none runs while the engine adds up gradients."""
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
        facts = (None if g is None else (g.shape, g.stride(), g.dtype) for g in gradients)
        self.given.append((node, tuple(facts)))

    def leave(self, node: int, gradients: Any, received: Any) -> None:
        """Note that a node ends, and count the gradients that arrive at other nodes."""
        self.current = None
        for edge, gradient in zip(self.edges[node], gradients, strict=False):
            if edge is None or gradient is None:
                continue
            self.arrived[edge] += 1
            if self.arrived[edge] > 1:
                self.logged.setdefault(edge[0], []).append(Logged(("sum", edge), _sum(gradient)))


class BackwardGraph:
    """The autograd nodes behind some tensors, each with the call that made it.

    A pair (number, call) of `marks` says that nodes from the number on are the call's.
    """

    def __init__(self, roots: Sequence[Tensor], marks: Sequence[tuple[int, int]]) -> None:
        self._roots = roots
        self._starts = [_edge_of(root) for root in roots]
        self._numbers = dict[Node, int]()
        self.edges: list[list[Edge | None]] = []
        self._walk([node for node, _ in self._starts])
        starts = [start for start, _ in marks]
        places = (bisect_right(starts, node_number(node) or 0) - 1 for node in self._numbers)
        self.calls = [marks[max(place, 0)][1] for place in places]
        nodes = zip(self._numbers, self.calls, strict=True)
        self.custom = {call for node, call in nodes if isinstance(node, BackwardCFunction)}
        """Calls that made a node of a custom autograd function."""
        self._place_leaves()
        self.given = Counter[tuple[int, Hashable]]()
        """Numbers of (call, gradients that one of its nodes was given), once it ran."""

    def free(self) -> None:
        """Free the nodes, each before the nodes behind it; nothing else may hold the tensors.

        torch frees nodes that Python has seen recursively, unless Python still holds the next one.
        A deep graph would exceed the stack.
        """
        self._roots, self._starts = (), []
        nodes = sorted(self._numbers, key=lambda node: node_number(node) or 0)
        self._numbers = {}
        while nodes:
            nodes.pop()

    def _walk(self, waiting: list[Node]) -> None:
        """Number all nodes, and list the edges that their gradients take."""
        self._numbers = {node: n for n, node in enumerate(dict.fromkeys(waiting))}
        waiting = list(self._numbers)
        edges_of: dict[int, list[Edge | None]] = {}
        while waiting:
            node = waiting.pop()
            edges = edges_of[self._numbers[node]] = list[Edge | None]()
            for after, place in node.next_functions:
                if after is None:
                    edges.append(None)
                    continue
                if after not in self._numbers:
                    self._numbers[after] = len(self._numbers)
                    waiting.append(after)
                edges.append((self._numbers[after], place))
        self.edges = [edges_of[n] for n in range(len(edges_of))]

    def _place_leaves(self) -> None:
        """Assign each parameter's node to the first call that uses it."""
        leaves = {n for node, n in self._numbers.items() if node.name() == _LEAF}
        users: dict[int, int] = {}
        for n, edges in enumerate(self.edges):
            for edge in edges:
                if edge is not None and edge[0] in leaves:
                    users[edge[0]] = min(users.get(edge[0], self.calls[n]), self.calls[n])
        for leaf in leaves:
            self.calls[leaf] = users.get(leaf, 0)

    def run(
        self, recorder: Recorder, boundaries: Sequence[Tensor], weights: Sequence[Tensor]
    ) -> dict[int, list[Operator]]:
        """Return the operators of each call's backward, each with its part.

        The graph runs twice: an operator that also runs for gradients of `boundaries` alone is in
        the input part.
        """
        # 1. Run the backward for gradients of inputs only, then for those of weights too.
        of_inputs = self._logged(recorder, boundaries, keeps=True)
        of_all = self._logged(recorder, [*boundaries, *weights], keeps=False)
        # 2. Match the operators of each node: those that only the second run has are for weights.
        operators: dict[int, list[Operator]] = {}
        for node, logged in sorted(of_all.logged.items(), reverse=True):
            unmatched = Counter(entry.key for entry in of_inputs.logged.get(node, ()))
            for key, operator in logged:
                unmatched[key] -= 1
                part = Part.INPUT if unmatched[key] >= 0 else Part.WEIGHT
                operators.setdefault(self.calls[node], []).append(replace(operator, part=part))
        return operators

    def _logged(self, recorder: Recorder, wanted: Sequence[Tensor], *, keeps: bool) -> BackwardLog:
        """Return the log of one backward; `keeps` the graph for another one."""
        # 1. Find the wanted tensors that the graph leads to; without any there is no backward.
        backward = BackwardLog(self.edges)
        ends = [(tensor, _edge_of(tensor)[0]) for tensor in wanted]
        known = [(tensor, self._numbers[end]) for tensor, end in ends if end in self._numbers]
        if not known:
            return backward
        backward.arrived.update((self._numbers[node], place) for node, place in self._starts)
        # 2. Run it with hooks around each node; an error is that of the call that made the node.
        seeds = [torch.empty_like(root) for root in self._roots]
        with self._hooked(backward), recorder.backward(backward.note):
            try:
                torch.autograd.grad(
                    self._roots,
                    [tensor for tensor, _ in known],
                    seeds,
                    allow_unused=True,
                    retain_graph=keeps,
                )
            except Exception:
                if backward.current is not None:
                    recorder.blame(self.calls[backward.current])
                raise
        names = [node.name() for node in self._numbers]
        self.given.update((self.calls[n], (keeps, names[n], facts)) for n, facts in backward.given)
        # 3. Drop sums at nodes that did not run: the engine does not compute them.
        needed = backward.ran | {number for _, number in known}
        for node in backward.logged.keys() - needed:
            del backward.logged[node]
        return backward

    @contextmanager
    def _hooked(self, backward: BackwardLog) -> Iterator[None]:
        handles = []
        for node, number in self._numbers.items():
            handles.append(node.register_prehook(partial(backward.enter, number)))
            handles.append(node.register_hook(partial(backward.leave, number)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _edge_of(tensor: Tensor) -> tuple[Node, int]:
    edge = get_gradient_edge(tensor)
    return edge.node, edge.output_nr


def _sum(gradient: Tensor) -> Operator:
    return Operator(
        name="elementwise",
        part=Part.INPUT,
        flops=0,
        num_bytes=3 * gradient.numel() * gradient.element_size(),
        dtype=dtype_name(gradient.dtype),
    )
