"""Costs of layers as a stage on a mesh of devices, which divide the operators.

layers x sub-mesh     the best of the logical shapes of its devices, by a memory policy:
                      recompute stages, or one segment of a stage at a time; let a byte count
a shape               one integer program for each kind of layer, composed for all ranges
"""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from penstock.costs.cluster import Cluster
from penstock.costs.cluster.collectives import Collective, Form, fastest_s, forms_of
from penstock.costs.counting.graph import Graph
from penstock.sharding.costs import USUAL_STATE, Costs, StateRatio
from penstock.sharding.layouts import FEW_BYTES, I, Numbers
from penstock.sharding.named import ready_plan
from penstock.sharding.routed import with_end
from penstock.sharding.search import Part, Ranges, Search
from penstock.trace.progress import saying

from .submeshes import Hosts, Stage, Submesh

_LIGHT_BYTE_S = 1e-11
"""Seconds that a byte counts for where stages are to keep less."""
_FORWARD, _ONCE = 3, 4
"""Where tables of stages have the seconds of a forward, and those of a step."""


class MemoryPolicy(NamedTuple):
    """Recompute by stage or by layer (`segments`), and the price of a resident byte in seconds."""

    recomputes: bool = False
    byte_s: float = 0.0
    segments: bool = False

    def __str__(self) -> str:
        each, priced = " each layer" * self.segments, ", bytes priced" * (self.byte_s > 0)
        return (f"recompute{each}" if self.recomputes else "no recompute") + priced


MEMORY_POLICIES = (
    MemoryPolicy(),
    MemoryPolicy(byte_s=_LIGHT_BYTE_S),
    MemoryPolicy(recomputes=True),
    MemoryPolicy(recomputes=True, byte_s=_LIGHT_BYTE_S),
    MemoryPolicy(recomputes=True, segments=True),
)


class OnMesh(NamedTuple):
    """A stage on a mesh.

    The first five fields are its prices, as those of a `Task`.  `shape` has the lengths of the
    axes of its shards.  Seconds are those of a micro-batch, and bytes those of a device: the
    optimizer moves `update_bytes` once a step, and `graph_bytes` are the largest graph of a
    segment.
    """

    seconds: float
    stay_bytes: float
    microbatch_bytes: float
    handover_s: float
    once_s: float
    shape: tuple[int, ...]
    num_layers: int
    forward_s: float
    backward_s: float
    weight_bytes: float
    gradient_bytes: float
    optimizer_bytes: float
    update_bytes: float
    graph_bytes: float

    @property
    def state_bytes(self) -> float:
        """Bytes of weights, gradients and the optimizer."""
        return self.weight_bytes + self.gradient_bytes + self.optimizer_bytes


def hosts_of(cluster: Cluster) -> list[Hosts]:
    """Return the kinds of hosts of a cluster, as the search knows them."""
    return [
        Hosts(
            host.count,
            len(host.devices),
            min(cluster.devices[kind].memory_bytes for kind in host.devices),
        )
        for host in cluster.hosts
    ]


@dataclass(frozen=True)
class MeshPrices:
    """Prices of the layers of a graph, which are those of a micro-batch, on meshes of a cluster.

    `spans` are the (start, end) of layers that are to be on one stage; `plan` is the ready plan by
    which operators are divided.
    """

    graph: Graph
    names: Sequence[str]
    spans: Sequence[tuple[int, int]]
    cluster: Cluster
    num_microbatches: int
    plan: str = "auto"
    policy: MemoryPolicy = MEMORY_POLICIES[0]
    shared: dict[object, Search] = field(default_factory=dict)
    """The search of each shape, which several policies share."""
    factors: tuple[float, ...] = ()
    """Measured seconds of each layer by those of the roofline, where layers were measured."""
    state: StateRatio = USUAL_STATE
    """Bytes of weights, gradients and optimizer state for each byte of a weight."""
    known: dict[object, Any] = field(default_factory=dict)
    """What `Costs` of all shapes share."""
    shapes: "Shapes" = lambda submesh, hosts: every_shape(submesh)
    """The shapes in which meshes are tried."""

    def begin(self, submeshes: Iterable[Submesh], executor: Executor) -> None:
        """Let an executor solve the programs of all shapes of meshes, from now on."""
        for submesh in submeshes:
            for shape in self._shapes(submesh) if self._may_be(submesh).any() else ():
                self._search(submesh, shape).begin(self.policy.byte_s, executor)

    def on_mesh(self, start: int, end: int, submesh: Submesh) -> OnMesh | None:
        """Return the fastest way to run a stage on a mesh; of those that fit, if any does.  None
        where the cut is inside a span.
        """
        shapes, best = self._best_shapes_on(submesh)
        which = best[start, end]
        return None if which < 0 else self._in_shape(start, end, submesh, shapes[which])

    def of_stages(self, submesh: Submesh, *, is_1f1b: bool = False) -> Numbers:
        """Return the fields of the prices of all stages on a mesh [field, start, end], infinite
        for what cannot be.

        In 1F1B the last stage's backwards follow its forwards at once, so its last segment
        recomputes nothing.
        """
        shapes, best = self._best_shapes_on(submesh)
        found = np.full((5, *best.shape), np.inf)
        if not shapes:
            return found
        every = np.stack([self._table(submesh, shape) for shape in shapes])
        own = every[:, [0, 1, 2, _ONCE]]
        found[[0, 1, 2, 4]] = np.take_along_axis(own, best[None, None], axis=0)[0]
        if is_1f1b and self.policy.recomputes:
            starts = np.flatnonzero(best[:, -1] >= 0)
            lasts = sorted(self._cuts)[-2] if self.policy.segments else starts
            found[0, starts, -1] -= every[best[starts, -1], _FORWARD, lasts, -1]
        ends = range(1, best.shape[1])
        found[3, :, 1:] = [self.handover_s(end, submesh, submesh.kind) for end in ends]
        found[:, best < 0] = np.inf
        return found

    def _may_be(self, submesh: Submesh) -> Numbers:
        """Tell which stages [start, end] there may be on a mesh: their ends are cuts."""
        is_cut = np.isin(np.arange(len(self.names) + 1), [*self._cuts])
        return np.triu(is_cut[:-1, None] & is_cut, 1) & bool(self._shapes(submesh))

    def _shapes(self, submesh: Submesh) -> Sequence[tuple[int, ...]]:
        return self.shapes(submesh, self._hosts[submesh.kind])

    def _best_shapes_on(self, submesh: Submesh) -> tuple[Sequence[tuple[int, ...]], Numbers]:
        """Return the shapes of a mesh, and for stages which is the fastest, of those that fit if
        any does; -1 for what cannot be.
        """
        if submesh not in self._best_shapes:
            may_be = self._may_be(submesh)
            shapes, best = self._shapes(submesh) if may_be.any() else [], np.where(may_be, 0, -1)
            if shapes:
                every = np.stack([self._table(submesh, shape)[:5] for shape in shapes], axis=1)
                lacks = every[1] + every[2] > self._hosts[submesh.kind].memory_bytes
                seconds = every[0] + every[_ONCE] / self.num_microbatches
                seconds = np.where(lacks & ~lacks.all(axis=0), np.inf, seconds)
                best[may_be] = seconds.argmin(axis=0)[may_be]
            self._best_shapes[submesh] = shapes, best
        return self._best_shapes[submesh]

    def segments(self, stage: Stage, shape: tuple[int, ...]) -> list[OnMesh]:
        """Return the segments of a stage on a mesh of a shape: itself, if that is no way."""
        start, end, submesh = stage
        inner = (n for n in range(start + 1, end) if self.policy.segments and n in self._cuts)
        ends = pairwise((start, *inner, end))
        return [self._in_shape(*own, submesh, shape) for own in ends]

    def _in_shape(self, start: int, end: int, submesh: Submesh, shape: tuple[int, ...]) -> OnMesh:
        every = self._table(submesh, shape)[:, start, end].tolist()
        seconds, stay_bytes, keeps, forward_s, once_s, *rest = every
        price = seconds, stay_bytes, keeps, self.handover_s(end, submesh, submesh.kind), once_s
        return OnMesh(*price, shape, end - start, forward_s, *rest)

    def _table(self, submesh: Submesh, shape: tuple[int, ...]) -> Numbers:
        """Return tables of stages: seconds and bytes of a price, and what else `OnMesh` has."""
        key = self._where(submesh), shape
        if key not in self._tables:
            with saying(f"dividing layers among {' x '.join(map(str, shape))} devices"):
                ranges = self._search(submesh, shape).of_ranges(self.policy.byte_s)
            summed = self._summed(ranges)
            total_s, forward_s, once_s, *lasting, updates, keeps, enters, graph = summed
            stays = sum(lasting)
            price = total_s, stays, keeps
            if self.policy.recomputes:  # one segment's graph at a time, and all that enters them
                price = total_s + forward_s, stays + graph, enters
            with np.errstate(invalid="ignore"):  # infinite where there is no range
                backward_s = total_s - forward_s
                every = (*price, forward_s, once_s, backward_s, *lasting, updates, graph)
            self._tables[key] = np.stack(every)
        return self._tables[key]

    def _summed(self, ranges: Ranges) -> Sequence[Numbers]:
        """Return the tables as sums over a stage's segments, and a segment's largest graph."""
        if not self.policy.segments:
            return *ranges, ranges.keeps
        cuts = np.array(sorted(self._cuts))
        found = np.full((len(ranges) + 1, *ranges.seconds.shape), np.inf)
        each = Ranges(*(table[cuts[:-1], cuts[1:]] for table in ranges))
        own = np.stack(each)
        for n, start in enumerate(cuts[:-1]):
            found[:-1, start, cuts[n + 1 :]] = own[:, n:].cumsum(axis=1)
            found[-1, start, cuts[n + 1 :]] = np.maximum.accumulate(each.keeps[n:])
        return [*found]

    @cached_property
    def _best_shapes(self) -> dict[Submesh, tuple[Sequence[tuple[int, ...]], Numbers]]:
        return {}

    @cached_property
    def _tables(self) -> dict[object, Numbers]:
        return {}

    def _search(self, submesh: Submesh, shape: tuple[int, ...]) -> Search:
        key = self._where(submesh), shape
        if key not in self.shared:
            ready = ready_plan(self.plan)
            devices = self.devices(submesh)
            costs = Costs(shape, self.cluster, self.num_microbatches, devices=devices)
            costs = replace(costs, factors=self.factors, state=self.state, known=self.known)
            count, has_end = len(self.names), bool(self.ended.of_layer(len(self.names)))
            part = Part(range(count + has_end), has_end=has_end)
            names = [*self.names, "the code after the last layer"]
            like = next(iter(self.shared.values()), None)
            self.shared[key] = Search(
                self.ended, names[: len(part.layers)], part, ready, costs, like=like
            )
        return self.shared[key]

    @cached_property
    def ended(self) -> Graph:
        """The graph with the code after the last layer, or the loss, as a layer of its own."""
        return with_end(self.graph, len(self.names))

    def _where(self, submesh: Submesh) -> object:
        """Return what meshes of one shape have in common that cost the same."""
        if not submesh.devices:
            return submesh.kind, submesh.num_hosts > 1
        places = [self.cluster.places[n] for n in submesh.devices]
        return submesh.kind, tuple((own.host - places[0].host, own.number) for own in places)

    def devices(self, submesh: Submesh) -> tuple[int, ...]:
        """Return the given devices of a mesh, or the first of the cluster that make such a one."""
        if submesh.devices:
            return submesh.devices
        before = sum(host.count * len(host.devices) for host in self.cluster.hosts[: submesh.kind])
        return tuple(range(before, before + submesh.size))

    def handover_s(
        self, end: int, submesh: Submesh, kind: int, onto: tuple[int, ...] = ()
    ) -> float:
        """Return the seconds of what goes to the next stage and back: on hosts of a kind, or
        `onto` given devices.  The receiving mesh gathers values that are whole on each device.
        """
        is_here = onto != () and onto == submesh.devices
        if end == len(self.names) or len(self.cluster.places) == 1 or is_here:
            return 0.0
        if (submesh, kind, onto) not in self._ways_out:
            self._ways_out[submesh, kind, onto] = self._way_out(submesh, kind, onto)
        latency_s, bytes_per_s, gathers = self._ways_out[submesh, kind, onto]
        num_bytes = self.entering_bytes(end)
        gather_s = sum(fastest_s(forms, num_bytes) for forms in gathers)
        return 2 * (latency_s + num_bytes / bytes_per_s) + gather_s * (num_bytes >= FEW_BYTES)

    def entering_bytes(self, start: int) -> float:
        """Return the bytes of a micro-batch that layers from `start` on are given by others."""
        return float(self._entering[start])

    def _way_out(
        self, submesh: Submesh, kind: int, onto: tuple[int, ...] = ()
    ) -> tuple[float, float, Sequence[Sequence[Form]]]:
        """Return latency and bytes a second from a mesh to the next one, and the gathers there and
        back here: `onto` given devices, or on hosts of a kind if there are others of it, over the
        network where there are several hosts.

        Each byte crosses once, and all devices send (`transport.crossing`): by all their network
        cards at once, or by their links inside a host.  Then the devices gather what is whole on
        each; a mesh that is not given gathers as this one.
        """
        own, places, (count, size, _) = (
            self.devices(submesh),
            self.cluster.places,
            self._hosts[kind],
        )
        hosts, every, first = {places[n].host for n in own}, range(len(places)), own[0]
        there = onto or (*self.devices(Submesh(kind, count, size)), *every)
        away = [n for n in there if places[n].host not in hosts]
        beside = next(n for n in (*onto, *every) if n != first)
        route = self.cluster.route(first, away[0] if away else beside)
        cards = {(places[n].host, self.cluster.host_of(n).card_of(places[n].number)) for n in own}
        at_once = len(cards) if away else submesh.size
        is_whole = ready_plan(self.plan).borders.keys() == {I}
        gathers = [
            forms_of(self.cluster, [mesh], Collective.ALL_GATHER)
            for mesh in (onto or own, own)
            if is_whole
        ]
        return route.latency_s, route.bytes_per_s * at_once, gathers

    @cached_property
    def _ways_out(self) -> dict[object, tuple[float, float, Sequence[Sequence[Form]]]]:
        return {}

    @cached_property
    def _hosts(self) -> list[Hosts]:
        return hosts_of(self.cluster)

    @cached_property
    def _cuts(self) -> frozenset[int]:
        return frozenset((0, len(self.names), *(end for _, end in self.spans)))

    @cached_property
    def _entering(self) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
        """Bytes that layers from each on are given by those before; targets pass no layer."""
        count = len(self.names)
        found = np.zeros(count + 1)
        for value in self.graph.values:
            if value.maker >= 0 or min(value.users) < count:
                found[value.maker + 1 : max(value.users) + 1] += value.num_bytes
        return found


Shapes = Callable[[Submesh, Hosts], Sequence[tuple[int, ...]]]
"""Returns the lengths of axes along which a mesh's devices are arranged, for each shape that is
tried, by the hosts of its kind; nothing if no stage is to be on such a mesh.
"""


def every_shape(submesh: Submesh) -> list[tuple[int, ...]]:
    """Return the given shape of a mesh, or all that there are of one axis or two."""
    if submesh.shape:
        return [submesh.shape]
    count, inside = submesh.size, submesh.num_devices
    inners = (n for n in range(2, inside + 1) if count % n == inside % n == 0 and n < count)
    return [(count,), *((count // inner, inner) for inner in inners)]


def few_shapes(submesh: Submesh, hosts: Hosts) -> list[tuple[int, ...]]:
    """Return shapes of fewer meshes, for hosts or clusters of many devices.

    Parts of a host, and numbers of hosts, are powers of two or divide the whole: Alpa takes powers
    of two and whole hosts (section 5.2).  Of two axes the inner one is a power of two: the shorter
    one in a host, and the longest two that fit one, or all of it, on several.
    """
    number, most = submesh.num_devices, hosts.num_devices
    if submesh.num_hosts > 1:
        number, most = submesh.num_hosts, hosts.num_hosts
    is_taken = number & (number - 1) == 0 or most % number == 0
    if submesh.shape or submesh.num_devices == 1 or not is_taken:
        return every_shape(submesh) if is_taken else []
    size, inside = submesh.size, submesh.num_devices
    powers = [1 << n for n in range(1, inside.bit_length()) if inside % (1 << n) == 0]
    if submesh.num_hosts > 1:
        return [(size // n, n) for n in sorted({*powers, inside})[-2:]]
    return [(size,), *((size // n, n) for n in powers if n * n <= size)]
