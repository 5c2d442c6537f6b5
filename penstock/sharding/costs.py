"""What a way to divide a layer costs: seconds of a micro-batch, and bytes that stay on a device.

a call         its operators by the roofline, each a share of the whole where the call is cut
a conversion   forward and backward collectives along each axis, over the cluster's links
a weight       its gradient's sum once a step, shared by M micro-batches; weight, gradient and
               optimizer state in memory
what is saved  activations of all micro-batches in flight
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod
from typing import Any, Self

import numpy

from penstock.costs import collectives
from penstock.costs.cluster import Cluster
from penstock.costs.graph import Call, Graph, TensorSpec
from penstock.costs.profile import Operator, Part
from penstock.costs.roofline import operator_seconds
from penstock.interval import likely

from .layouts import I, Layout, Move, R, S, State, moves, steps
from .plan import LayerSharding, PlannedCall
from .rules import ALIKE

_COLLECTIVES: dict[Move, Callable[[Cluster, Sequence[int], float], float]] = {
    Move.ALL_REDUCE: collectives.all_reduce_s,
    Move.ALL_GATHER: collectives.all_gather_s,
    Move.REDUCE_SCATTER: collectives.reduce_scatter_s,
    Move.ALL_TO_ALL: collectives.all_to_all_s,
}
_EACH_CONVERSION_S = 1e-7
"""What a conversion counts for beside what it moves: fewer of them are better."""
USUAL_CLUSTER = "dgx-a100"
"""What is assumed where nobody says what the devices are: eight that are well connected."""


@dataclass(frozen=True)
class Costs:
    """Prices on a mesh whose devices are those of a cluster with these numbers, or the first ones,
    neighbours along the last axis.

    `num_microbatches` share a step's sum of gradients, `num_in_flight` of them are kept at once;
    an optimizer keeps `state_bytes` for each byte of a weight (Adam: 2).  Operators of layer n
    take `factors[n]` times the roofline's seconds: as many as measured, where it was measured.
    """

    mesh: tuple[int, ...]
    cluster: Cluster
    num_microbatches: int = 1
    num_in_flight: int = 1
    state_bytes: float = 2.0
    devices: tuple[int, ...] = ()
    factors: tuple[float, ...] = ()

    @classmethod
    def usual(cls, mesh: Sequence[int], num_microbatches: int = 1, num_in_flight: int = 1) -> Self:
        """Return prices on what is usually meant."""
        one = Cluster.load(USUAL_CLUSTER)
        hosts = -(-prod(mesh) // len(one.places))
        cluster = one.times(hosts) if hosts > 1 else one
        return cls(tuple(mesh), cluster, num_microbatches, num_in_flight)

    def call_s(self, call: Call, planned: PlannedCall) -> float:
        """Return the seconds of a call, forward and backward."""
        parts = prod(n for n, choice in zip(self.mesh, planned.choices, strict=True) if choice.cut)
        own = sum(self._operator_s(operator, parts) for operator in call.operators)
        return own * self.factor(call.layer)

    def factor(self, layer: int) -> float:
        """Return how many times the roofline's seconds the operators of a layer take."""
        return self.factors[layer] if self.factors else 1.0

    def forward_s(self, calls: Sequence[Call], plan: LayerSharding, seconds: float) -> float:
        """Return what of a layer's seconds is its forward; conversions by what they send."""
        planned = plan.calls or (PlannedCall("", (ALIKE,) * len(self.mesh)),) * len(calls)
        forward_s, every_s = 0.0, 0.0
        for call, own in zip(calls, planned, strict=True):
            parts = prod(n for n, c in zip(self.mesh, own.choices, strict=True) if c.cut)
            for operator in call.operators:
                operator_s = self._operator_s(operator, parts) * self.factor(call.layer)
                every_s += operator_s
                forward_s += operator_s if operator.part is Part.FORWARD else 0.0
        sent = plan.forward_bytes + plan.backward_bytes
        share = plan.forward_bytes / sent if sent else 0.0
        return forward_s + max(0.0, seconds - every_s) * share

    def conversions_s(
        self,
        spec: TensorSpec,
        before: Sequence[Layout],
        after: Sequence[Layout],
        *,
        again: bool = False,
    ) -> Any:
        """Return the seconds of conversions of a value, and of its gradient on the way back: an
        array of `before` x `after`; `again`: the value is converted for the backward, too.
        """
        how = spec.num_bytes, spec.wants_gradient, again
        key = how, tuple(before), tuple(after)
        if key not in self._known_tables:
            rows = [[self._conversion_s(*how, old, new) for new in after] for old in before]
            self._known_tables[key] = numpy.array(rows)
        return self._known_tables[key]

    def _conversion_s(
        self, num_bytes: int, has_gradient: bool, again: bool, before: Layout, after: Layout
    ) -> float:
        if before == after:
            return 0.0
        found = _EACH_CONVERSION_S
        for axis, cut, both in _moves_of(before, after):
            parts = prod(self.mesh[n] for n in cut)
            for move in (*both[: 1 + has_gradient], *both[:again]):
                found += self._move_s(axis, move, num_bytes / parts)
        return found

    def sum_s(self, spec: TensorSpec, at_rest: Layout) -> float:
        """Return a micro-batch's share of the seconds in which a weight's gradient is summed."""
        num_bytes = self.bytes_of(spec, at_rest)
        axes = (n for n, state in enumerate(at_rest) if state is R)
        return (
            sum(self._move_s(n, Move.ALL_REDUCE, num_bytes) for n in axes) / self.num_microbatches
        )

    def bytes_of(self, spec: TensorSpec, layout: Sequence[State]) -> float:
        """Return the bytes of what a device holds of a tensor."""
        parts = (n for n, state in zip(self.mesh, layout, strict=True) if isinstance(state, S))
        return spec.num_bytes / prod(parts)

    def weight_bytes(self, spec: TensorSpec, at_rest: Layout) -> float:
        """Return the bytes of a weight, its gradient and its optimizer state."""
        return self.bytes_of(spec, at_rest) * (2 + self.state_bytes)

    def saved_bytes(
        self, graph: Graph, call: Call, planned: PlannedCall, users: Mapping[int, int]
    ) -> float:
        """Return the bytes of what a call saves, of all micro-batches in flight.

        What `users` calls save is shared among these.
        """
        shared = (
            self.bytes_of(graph.tensors[n], layout) / users.get(n, 1)
            for n, layout in _saved(graph, call, planned)
        )
        return (self._inner_bytes(call, planned) + sum(shared)) * self.num_in_flight

    def layer_bytes(
        self, graph: Graph, calls: Sequence[Call], name: str, plan: LayerSharding
    ) -> float:
        """Return the bytes that stay on a device for a layer: weights, gradients, optimizer state,
        and what all micro-batches in flight have saved.
        """
        whole = (I,) * len(self.mesh)
        specs = [graph.tensors[n] for n in dict.fromkeys(n for c in calls for n in c.takes)]
        found = sum(
            self.weight_bytes(spec, plan.weights.get(spec.name.removeprefix(f"{name}."), whole))
            for spec in specs
            if spec.name and spec.wants_gradient
        )
        return found + self.activation_bytes(graph, calls, plan)

    def activation_bytes(self, graph: Graph, calls: Sequence[Call], plan: LayerSharding) -> float:
        """Return the bytes of what all micro-batches in flight have saved on a device."""
        pairs = list(zip(calls, plan.calls, strict=False))  # a layer that is whole has no plan
        inner = sum(self._inner_bytes(*pair) for pair in pairs)
        held = {own for pair in pairs for own in _saved(graph, *pair)}
        found = inner + sum(self.bytes_of(graph.tensors[n], layout) for n, layout in held)
        return found * self.num_in_flight

    def _inner_bytes(self, call: Call, planned: PlannedCall) -> float:
        cuts = (n for n, choice in zip(self.mesh, planned.choices, strict=True) if choice.cut)
        return call.inner_bytes / prod(cuts)

    def _operator_s(self, operator: Operator, parts: int) -> float:
        device = self.cluster.device_of(self._place(0))
        dtype = operator.dtype if operator.dtype in device.flops_per_s else "float32"
        share = replace(
            operator,
            flops=operator.flops // parts,
            num_bytes=operator.num_bytes // parts,
            dtype=dtype,
        )
        return operator_seconds(share, device)

    def _move_s(self, axis: int, move: Move, num_bytes: float) -> float:
        if move is Move.NONE:
            return 0.0
        key = axis, move.value, num_bytes
        if key not in self._known:
            inner = prod(self.mesh[axis + 1 :])
            group = [self._place(n) for n in range(0, inner * self.mesh[axis], inner)]
            collective = _COLLECTIVES.get(move)
            if collective is None:
                rate = likely(self.cluster.device_of(self._place(0)).bytes_per_s)
                self._known[key] = 2 * num_bytes / rate  # read once, written once
            else:
                own = num_bytes / len(group) if move is Move.ALL_TO_ALL else num_bytes
                self._known[key] = collective(self.cluster, group, own)
        return self._known[key]

    def _place(self, number: int) -> int:
        return self.devices[number] if self.devices else number

    @cached_property
    def _known(self) -> dict[tuple[int, str, float], float]:
        return {}

    @cached_property
    def _known_tables(self) -> dict[object, Any]:
        return {}


def _saved(graph: Graph, call: Call, planned: PlannedCall) -> Iterator[tuple[int, Layout]]:
    """Yield what a call saves, but weights, and the slices in which it does."""
    layouts = dict(zip(call.gives, planned.gives, strict=True))
    layouts |= dict(zip(call.takes, planned.takes, strict=True))
    for tensor in call.saved:
        spec = graph.tensors[tensor]
        if tensor in layouts and not (spec.name and spec.wants_gradient):
            slices = (state if isinstance(state, S) else I for state in layouts[tensor])
            yield tensor, tuple(slices)


@lru_cache(maxsize=1 << 16)
def _moves_of(
    before: Layout, after: Layout
) -> list[tuple[int, tuple[int, ...], tuple[Move, Move]]]:
    """Return the steps of a conversion: along which axis, which other axes cut the value, and what
    is done.
    """
    found, current = [], list(before)
    for axis, old, new in steps(before, after):
        others = (n for n, state in enumerate(current) if n != axis and isinstance(state, S))
        found.append((axis, tuple(others), moves(old, new)))
        current[axis] = new
    return found
