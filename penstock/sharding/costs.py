"""Costs of a divided layer: seconds of a micro-batch, and bytes that stay on a device.

a call         its operators by the roofline, each a share of the whole where the call is cut
a conversion   forward and backward collectives along each axis, over the cluster's links
a weight       its gradient's sum and its gather once a step, shared by M micro-batches; weight,
               gradient and optimizer state in memory
activations    bytes saved by all micro-batches in flight
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, NamedTuple, Self

import numpy

from penstock.costs.cluster import Cluster
from penstock.costs.cluster.collectives import Collective, Form, fastest_s, forms_of
from penstock.costs.counting.graph import Call, Graph, TensorSpec
from penstock.costs.records import Operator, Part
from penstock.costs.roofline import operator_seconds

from .divided import divided
from .layouts import I, Layout, Move, Numbers, R, S, State, moves_between, shrunk
from .plan import BUCKET_BYTES, LayerSharding, PlannedCall
from .rules import ALIKE

_LOCAL = (Move.SLICE, Move.PAD, Move.MASK)
"""Moves that send nothing."""
_EACH_CONVERSION_S = 1e-7
"""Seconds added to each conversion, so that the program prefers fewer of them."""
DIVIDED_AS = 5.0
"""Operators in whose issue a call finds its shards: a small call of a divided layer takes 37 to 43
microseconds more than the plain one, where an operator is issued in 7.1."""
USUAL_CLUSTER = "dgx-a100"
"""The default cluster: eight well connected devices."""


_Cache = dict[Any, Any]


class WeightBytes(NamedTuple):
    """Bytes of weights, of their gradients and of optimizer state on a device."""

    weights: float
    gradients: float
    optimizer: float


class StateRatio(NamedTuple):
    """Bytes for each byte of a weight; by default a gradient of its dtype and Adam's moments."""

    gradients: float = 1.0
    optimizer: float = 2.0
    moved: float = 0.0
    """Bytes that the optimizer moves in a step; 0: each tensor once each way."""


USUAL_STATE = StateRatio()


@dataclass(frozen=True)
class Costs:
    """Costs on a mesh of devices of a cluster, neighbours along the last axis.

    This table has the bytes on a device for each byte of a weight that is cut n times:

                          between steps    for all of a step    gradient
        zero3             1 / n                                 1 / n
        zero2, `keeps`    1 / n            1                    1 / n
        zero1, `gathers`  1 / n            1                    1
        data              1                                     1
    """

    mesh: tuple[int, ...]
    """Lengths of the mesh's axes."""
    cluster: Cluster
    num_microbatches: int = 1
    """Micro-batches of a step, which share the all-reduce of gradients."""
    num_in_flight: int = 1
    """Micro-batches whose activations are on the device at once."""
    state: StateRatio = USUAL_STATE
    devices: tuple[int, ...] = ()
    """Numbers of the mesh's devices in the cluster; () for the first ones."""
    factors: tuple[float, ...] = ()
    """Measured over roofline seconds, one factor per layer; () for 1."""
    keeps: bool = False
    """True where a weight is gathered once, for all of a step."""
    gathers: bool = False
    """True where a weight is cut between steps, and gathered for each."""
    cuda_graphs: bool = False
    """True where a step is one CUDA graph, so that the host issues no operators one by one."""
    known: _Cache = field(default_factory=dict, repr=False, compare=False)
    """Seconds of calls' operators and forms of collectives, by all that they depend on beside the
    cluster: meshes, graphs and numbers of micro-batches share them.
    """
    _moves_s: dict[Any, float] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Seconds of moves, by axis, kind and bytes."""
    _tables_s: _Cache = field(default_factory=dict, init=False, repr=False, compare=False)
    """Seconds of conversions, [before, after], by the value and both lists of layouts."""

    @classmethod
    def usual(cls, mesh: Sequence[int], num_microbatches: int = 1, num_in_flight: int = 1) -> Self:
        """Return costs on the default cluster, with as many hosts as the mesh needs."""
        one = Cluster.load(USUAL_CLUSTER)
        hosts = -(-prod(mesh) // len(one.places))
        cluster = one.times(hosts) if hosts > 1 else one
        return cls(tuple(mesh), cluster, num_microbatches, num_in_flight)

    def call_s(self, graph: Graph, call: Call, planned: PlannedCall) -> float:
        """Return the seconds of a call of a graph, forward and backward."""
        return sum(self._parts_s(graph, call, planned))

    def _parts_s(self, graph: Graph, call: Call, planned: PlannedCall) -> tuple[float, float]:
        cuts = tuple(own for own in zip(self.mesh, planned.choices, strict=True) if own[1].cut)
        # an identity is far quicker to hash than operators; the entry keeps them, and so it
        key = self.cluster.places[self._place(0)].kind, id(call.operators), cuts
        if key not in self.known:
            both, skew = [0.0, 0.0], prod(2 - 1 / n for n, choice in cuts if choice.is_skewed)
            for operator in call.operators:
                part = divided(operator, call, planned, self.mesh, graph.tensors)
                seconds = self._operator_s(part) * skew
                both[operator.part is not Part.FORWARD] += seconds
            self.known[key] = *both, call.operators
        forward_s, rest_s, _ = self.known[key]
        factor = self.factor(call.layer)
        return forward_s * factor, rest_s * factor

    def issued(
        self, layers: Iterable[tuple[int, int, int]], seconds: Numbers, forward_s: Numbers
    ) -> tuple[Numbers, Numbers]:
        """Return seconds of ranges of layers and of their forwards [first, end], host included.

        The host issues operators while devices run earlier ones, so the slower of the two counts,
        in all of a forward and in all of a backward.  However many devices divide an operator,
        the host of each issues it, and finds its shards besides.  A core does that between its
        operators, whose issue is part of their own seconds.  Collectives are not counted as
        operators.

        Args:
            layers: the operators of each layer's forward and backward, and its calls.
            seconds: the devices' seconds of a micro-batch, infinite for what cannot be.
            forward_s: the same for its forward.
        """
        device, is_divided = self.cluster.device_of(self._place(0)), prod(self.mesh) > 1
        if self.cuda_graphs or not device.issue_s:
            return seconds, forward_s
        is_core = device.torch_type == "cpu"
        counts = [(0.0, 0.0)]
        for forwards, backwards, calls in layers:
            found_s = DIVIDED_AS * is_divided * calls
            counts.append((found_s, 0) if is_core else (forwards + found_s, backwards))
        before_s = numpy.cumsum(counts, axis=0) * device.issue_s
        forwards_s, backwards_s = numpy.moveaxis(before_s - before_s[:-1, None], -1, 0)
        together = numpy.add if is_core else numpy.maximum
        slower_s = together(forward_s, forwards_s)
        with numpy.errstate(invalid="ignore"):  # infinite where there is no range
            both_s = slower_s + together(seconds - forward_s, backwards_s)
        return numpy.where(numpy.isfinite(seconds), both_s, numpy.inf), slower_s

    def factor(self, layer: int) -> float:
        """Return measured over roofline seconds of a layer; code after the last has its own."""
        return self.factors[min(layer, len(self.factors) - 1)] if self.factors else 1.0

    def forward_s(
        self, graph: Graph, calls: Sequence[Call], plan: LayerSharding, seconds: float
    ) -> float:
        """Return the part of a layer's seconds that its recompute repeats: its forward.

        The seconds are without those of `sums_s`.  Conversions count by the share of the bytes
        they send forward.
        """
        planned = plan.calls or (PlannedCall("", (ALIKE,) * len(self.mesh)),) * len(calls)
        parts_s = [self._parts_s(graph, *pair) for pair in zip(calls, planned, strict=True)]
        forward_s, rest_s = map(sum, zip(*parts_s, strict=True)) if parts_s else (0.0, 0.0)
        sent = plan.forward_bytes + plan.backward_bytes
        share = plan.forward_bytes / sent if sent else 0.0
        return forward_s + max(0.0, seconds - forward_s - rest_s) * share

    def sums_s(self, graph: Graph, calls: Sequence[Call], name: str, plan: LayerSharding) -> float:
        """Return the seconds of a layer's collectives that run once a step, after backwards."""
        shares_s = (self.once_s(*pair) for pair in self._at_rest(graph, calls, name, plan))
        return sum(shares_s) * self.num_microbatches

    def conversions_s(
        self,
        spec: TensorSpec,
        before: Sequence[Layout],
        after: Sequence[Layout],
        *,
        times: float = 1,
    ) -> Any:
        """Return the seconds of conversions of a value and of its gradient: [before, after].

        The value is converted so many `times` a micro-batch, its gradient once.
        """
        value = spec.num_bytes, spec.wants_gradient, times
        key = value, tuple(before), tuple(after)
        if key not in self._tables_s:
            moves, places, differs = moves_between(tuple(before), tuple(after))
            each_s = numpy.array(
                [
                    self._move_s(axis, move, spec.num_bytes / prod(self.mesh[n] for n in cut))
                    for axis, cut, move in moves
                ]
            )
            both_s = numpy.add.reduce([each_s[step] for step in places])
            # [before, after, value or gradient] to [before, after]
            seconds = both_s @ (times, float(spec.wants_gradient))
            self._tables_s[key] = seconds + _EACH_CONVERSION_S * differs
        return self._tables_s[key]

    def times(self, is_saved: bool) -> float:
        """Return the all-gathers of a weight for each micro-batch.

        A weight that the backward needs is gathered twice, and with `keeps` once for a step.
        """
        return 1 / self.num_microbatches if self.keeps else 1 + is_saved

    def once_s(self, spec: TensorSpec, at_rest: Layout) -> float:
        """Return a micro-batch's share of a weight's collectives that run once a step.

        They are the all-reduce of its gradient and the all-gather of its slices between steps.
        """
        num_bytes, seconds = self.bytes_of(spec, at_rest), 0.0
        held = list(self._between_steps(spec, at_rest))
        for axis in reversed(range(len(held))):  # the order in which `Gathered` goes
            if at_rest[axis] is R:
                seconds += self._in_bucket_s(axis, Move.ALL_REDUCE, num_bytes)
            if held[axis] != at_rest[axis]:
                held[axis] = at_rest[axis]
                seconds += self._in_bucket_s(axis, Move.ALL_GATHER, self.bytes_of(spec, held))
        return seconds / self.num_microbatches

    def _in_bucket_s(self, axis: int, move: Move, num_bytes: float) -> float:
        """Return a weight's share of the collective of its bucket; a large weight has its own."""
        bucket_bytes = max(num_bytes, BUCKET_BYTES)
        return self._move_s(axis, move, bucket_bytes) * num_bytes / bucket_bytes

    def _between_steps(self, spec: TensorSpec, at_rest: Layout) -> Layout:
        return shrunk(at_rest, spec.shape, self.mesh) if self.gathers else at_rest

    def bytes_of(self, spec: TensorSpec, layout: Sequence[State]) -> float:
        """Return the bytes of a tensor's part on a device."""
        parts = (n for n, state in zip(self.mesh, layout, strict=True) if isinstance(state, S))
        return spec.num_bytes / prod(parts)

    def weight_bytes(self, spec: TensorSpec, at_rest: Layout) -> WeightBytes:
        """Return the bytes of a weight, its gradient and its optimizer state during a step.

        A weight that is gathered for all of a step lies beside its slices.
        """
        between = self._between_steps(spec, at_rest)
        in_step = (I,) * len(self.mesh) if self.keeps else at_rest
        held = {_slices(between), _slices(in_step)}
        weight = sum(self.bytes_of(spec, layout) for layout in held)
        gradient = self.state.gradients * self.bytes_of(spec, at_rest)
        return WeightBytes(weight, gradient, self.state.optimizer * self.bytes_of(spec, between))

    def update_bytes(
        self, graph: Graph, calls: Sequence[Call], name: str, plan: LayerSharding
    ) -> float:
        """Return the bytes that the optimizer moves on a device for a layer, in a step."""
        pairs = self._at_rest(graph, calls, name, plan)
        held = (self.bytes_of(spec, self._between_steps(spec, at_rest)) for spec, at_rest in pairs)
        gradients, state, moved = self.state
        return (moved or 2 + gradients + 2 * state) * sum(held)

    def saved_bytes(
        self, graph: Graph, call: Call, planned: PlannedCall, users: Mapping[int, int]
    ) -> float:
        """Return the bytes that a call saves for all micro-batches in flight.

        Calls share the bytes of a tensor that `users` of them save.
        """
        shared = (
            self.bytes_of(graph.tensors[n], layout) / users.get(n, 1)
            for n, layout in _saved(graph, call, planned)
        )
        return (self._inner_bytes(call, planned) + sum(shared)) * self.num_in_flight

    def layer_bytes(
        self, graph: Graph, calls: Sequence[Call], name: str, plan: LayerSharding
    ) -> float:
        """Return the bytes of a layer on a device: weights, gradients, optimizer state, and the
        activations of all micro-batches in flight.
        """
        weights = sum(self.resident_bytes(graph, calls, name, plan))
        return weights + self.activation_bytes(graph, calls, plan)

    def resident_bytes(
        self, graph: Graph, calls: Sequence[Call], name: str, plan: LayerSharding
    ) -> WeightBytes:
        """Return the bytes of a layer's weights, gradients and optimizer state on a device."""
        each = (self.weight_bytes(*pair) for pair in self._at_rest(graph, calls, name, plan))
        return WeightBytes(*map(sum, zip(WeightBytes(0, 0, 0), *each, strict=True)))

    def _at_rest(
        self, graph: Graph, calls: Sequence[Call], name: str, plan: LayerSharding
    ) -> Iterator[tuple[TensorSpec, Layout]]:
        """Yield the weights of a layer with their layouts at rest."""
        whole = (I,) * len(self.mesh)
        for spec in weights_of(graph, calls):
            yield spec, plan.weights.get(spec.name.removeprefix(f"{name}."), whole)

    def activation_bytes(self, graph: Graph, calls: Sequence[Call], plan: LayerSharding) -> float:
        """Return the bytes of activations of all micro-batches in flight on a device."""
        pairs = list(zip(calls, plan.calls, strict=False))  # a layer that is whole has no plan
        inner = sum(self._inner_bytes(*pair) for pair in pairs)
        held = {tensor for pair in pairs for tensor in _saved(graph, *pair)}
        num_bytes = inner + sum(self.bytes_of(graph.tensors[n], layout) for n, layout in held)
        return num_bytes * self.num_in_flight

    def _inner_bytes(self, call: Call, planned: PlannedCall) -> float:
        cuts = (n for n, choice in zip(self.mesh, planned.choices, strict=True) if choice.cut)
        return call.inner_bytes / prod(cuts)

    def _operator_s(self, operator: Operator) -> float:
        device = self.cluster.device_of(self._place(0))
        dtype = operator.dtype if operator.dtype in device.flops_per_s else "float32"
        return operator_seconds(replace(operator, dtype=dtype), device)

    def _move_s(self, axis: int, move: Move, num_bytes: float) -> float:
        if move is Move.NONE:
            return 0.0
        key = axis, move.value, num_bytes
        if key not in self._moves_s:
            if move in _LOCAL:
                rate = self.cluster.device_of(self._place(0)).bytes_per_s
                self._moves_s[key] = 2 * num_bytes / rate  # read once, written once
            else:
                sent = num_bytes / self.mesh[axis] if move is Move.ALL_TO_ALL else num_bytes
                self._moves_s[key] = fastest_s(self._forms_of(axis, move), sent)
        return self._moves_s[key]

    def _forms_of(self, axis: int, move: Move) -> tuple[Form, ...]:
        """Return the forms of a collective that all groups of an axis run at once."""
        key = self.devices, self.mesh, axis, move.value
        if key not in self.known:
            inner, length = prod(self.mesh[axis + 1 :]), self.mesh[axis]
            block = inner * length
            groups = [
                [self._place(first + n * inner) for n in range(length)]
                for start in range(0, prod(self.mesh), block)
                for first in range(start, start + inner)
            ]
            self.known[key] = forms_of(self.cluster, groups, Collective(move.value))
        forms: tuple[Form, ...] = self.known[key]
        return forms

    def _place(self, number: int) -> int:
        return self.devices[number] if self.devices else number


def weights_of(graph: Graph, calls: Sequence[Call]) -> Iterator[TensorSpec]:
    """Yield the weights that calls use, each once."""
    for n in dict.fromkeys(n for call in calls for n in call.takes):
        if graph.tensors[n].name and graph.tensors[n].wants_gradient:
            yield graph.tensors[n]


def _saved(graph: Graph, call: Call, planned: PlannedCall) -> Iterator[tuple[int, Layout]]:
    """Yield the tensors that a call saves, except weights, with their layouts."""
    layouts = dict(zip(call.gives, planned.gives, strict=True))
    layouts |= dict(zip(call.takes, planned.takes, strict=True))
    for tensor in call.saved:
        spec = graph.tensors[tensor]
        if tensor in layouts and not (spec.name and spec.wants_gradient):
            yield tensor, _slices(layouts[tensor])


def _slices(layout: Layout) -> Layout:
    """Return the layout with I in the place of R and P: a device holds as many bytes."""
    return tuple(state if isinstance(state, S) else I for state in layout)
