"""Costs of layers as a stage on a mesh of devices, which divide the operators.

layers x sub-mesh     options: each logical shape of its devices with each memory policy, which is
                      to recompute nothing, some layers or the stage, and to let a byte count
a shape               one integer program for each kind of layer, composed for all ranges
"""

from collections.abc import Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from penstock.costs.cluster import Cluster
from penstock.costs.cluster.collectives import Collective, Form, fastest_s, forms_of
from penstock.costs.counting.graph import Graph
from penstock.schedules.memory import Kept
from penstock.sharding.costs import USUAL_STATE, Costs, StateRatio
from penstock.sharding.layouts import FEW_BYTES, I, Numbers
from penstock.sharding.named import ready_plan
from penstock.sharding.routed import with_end
from penstock.sharding.search import Part, Ranges, Search
from penstock.types import Recompute, RecomputeLayers, RecomputePolicy

from .submeshes import (
    MEMORY_POLICIES,
    Hosts,
    MemoryPolicy,
    Option,
    Shapes,
    Stage,
    Submesh,
    every_shape,
    hosts_of,
)

_TINY_S = 1e-12
"""Seconds that a layer takes at least, where it is asked what its recompute costs."""
_FORWARD, _ONCE, _BACKWARD = 3, 4, 5
"""Where tables of stages have the seconds of a forward, of a step, and of a backward."""


class OnMesh(NamedTuple):
    """A stage on a mesh.

    The first five fields are its prices, as those of a `Task`.  Seconds are those of a
    micro-batch; `recompute_s` are a part of `seconds`.  Bytes are those of a device.  The
    optimizer moves `update_bytes` once a step.  A backward builds a graph of `graph_bytes` again:
    that of the stage or of its largest layer.  Without recompute they are a micro-batch's.
    """

    seconds: float
    stay_bytes: float
    microbatch_bytes: float
    handover_s: float
    once_s: float
    option: Option
    recompute: RecomputePolicy
    forward_s: float
    backward_s: float
    weight_bytes: float
    gradient_bytes: float
    optimizer_bytes: float
    update_bytes: float
    graph_bytes: float
    recompute_s: float

    @property
    def state_bytes(self) -> float:
        """Bytes of weights, gradients and the optimizer."""
        return self.weight_bytes + self.gradient_bytes + self.optimizer_bytes

    @property
    def kept(self) -> Kept:
        """Bytes of a micro-batch's activations, with its graph and before that is built again."""
        inputs, graph = round(self.microbatch_bytes), round(self.graph_bytes)
        if self.recompute is Recompute.NEVER:
            return Kept(graph, 0, 0)
        return Kept(graph + (self.recompute is not Recompute.STAGE) * inputs, inputs, 0)


@dataclass(frozen=True)
class MeshPrices:
    """Prices of the layers of a graph, which are those of a micro-batch, on meshes of a cluster.

    `spans` are the (start, end) of layers that are to be on one stage; `plan` is the ready plan by
    which operators are divided, and `policies` are the memory policies that a stage may have.
    """

    graph: Graph
    names: Sequence[str]
    spans: Sequence[tuple[int, int]]
    cluster: Cluster
    num_microbatches: int
    plan: str = "auto"
    policies: Sequence[MemoryPolicy] = MEMORY_POLICIES[:1]
    shared: dict[object, Search] = field(default_factory=dict)
    """The search of each shape, which prices of several policies share."""
    factors: tuple[float, ...] = ()
    """Measured seconds of each layer by those of the roofline, where layers were measured."""
    state: StateRatio = USUAL_STATE
    """Bytes of weights, gradients and optimizer state for each byte of a weight."""
    known: dict[object, Any] = field(default_factory=dict)
    """What `Costs` of all shapes share."""
    shapes: Shapes = lambda submesh, hosts: every_shape(submesh)
    """The shapes in which meshes are tried."""

    def begin(self, submeshes: Iterable[Submesh], executor: Executor) -> None:
        """Let an executor solve the programs of all shapes of meshes, from now on."""
        prices = dict.fromkeys(policy.byte_s for policy in self.policies)
        for submesh in submeshes:
            shapes = dict.fromkeys(option.shape for option in self.options(submesh))
            for shape, byte_s in product(shapes, prices):
                self._search(submesh, shape).begin(byte_s, executor)

    def options(self, submesh: Submesh) -> Sequence[Option]:
        """Return how a stage may be on a mesh; nothing if no stage may be there."""
        if submesh not in self._options:
            shapes = self._shapes(submesh) if self._may_be(submesh).any() else ()
            self._options[submesh] = [Option(*own) for own in product(shapes, self.policies)]
        return self._options[submesh]

    def on_mesh(self, stage: Stage, option: Option) -> OnMesh:
        """Return the price of a stage that may be, by an option."""
        start, end, submesh = stage
        every = self._table(submesh, option)[:, start, end].tolist()
        seconds, stay_bytes, keeps, forward_s, once_s, *rest = every
        price = seconds, stay_bytes, keeps, self.handover_s(end, submesh, submesh.kind), once_s
        return OnMesh(*price, option, option.policy.recompute, forward_s, *rest)

    def fastest(self, stage: Stage, in_flight: int) -> OnMesh:
        """Return the price of a stage by the option that takes least, sums of gradients counted,
        of those that fit with so many micro-batches in flight; of all, if none fits.
        """
        memory_bytes, number = self._hosts[stage.submesh.kind].memory_bytes, self.num_microbatches
        every = [self._fitted(stage, option, in_flight) for option in self.options(stage.submesh)]
        needs = (own.stay_bytes + in_flight * own.microbatch_bytes for own in every)
        fitting = [own for own, need in zip(every, needs, strict=True) if need <= memory_bytes]
        return min(fitting or every, key=lambda own: own.seconds + own.once_s / number)

    def _fitted(self, stage: Stage, option: Option, in_flight: int) -> OnMesh:
        """Return the price of a stage by an option; where its policy counts a share of layers,
        with the fewest recomputed that make it fit: first those that free most bytes per second.
        """
        own, (start, end, submesh) = self.on_mesh(stage, option), stage
        if option.policy.share is None:
            return own
        # 1. Recompute one layer more until the stage fits.
        limit = self._hosts[submesh.kind].memory_bytes - own.state_bytes
        ranges, again = self._ranges(submesh, option), list[int]()
        kept, enters, graph = ranges.keeps[start, end], ranges.enters[start, end], 0.0
        again_s, freed, graphs = (x[start:end] for x in self._of_layers(submesh, option))
        for n in np.argsort(-freed / np.maximum(again_s, _TINY_S), kind="stable").tolist():
            if graph + in_flight * kept <= limit or not freed[n]:
                break
            again.append(n)
            kept, graph = max(kept - freed[n], enters), max(graph, float(graphs[n]))
        # 2. Price it so.
        part, numbers = again_s[again].sum(), tuple(sorted(start + n for n in again))
        policy = Recompute.LAYERS if len(again) == end - start else RecomputeLayers(numbers)
        recompute_s = ranges.again_s[start, end] * part / again_s.sum() if part else 0.0
        return own._replace(
            seconds=own.forward_s + own.backward_s + float(recompute_s),
            stay_bytes=own.state_bytes + graph,
            microbatch_bytes=float(kept),
            recompute=policy if again else Recompute.NEVER,
            graph_bytes=graph if again else float(kept),
            recompute_s=float(recompute_s),
        )

    def of_stages(self, submesh: Submesh, *, is_1f1b: bool = False) -> Numbers:
        """Return the fields of the prices of all stages on a mesh by each option, as [option,
        field, start, end]: infinite for what cannot be.

        In 1F1B the last stage's backwards follow its forwards at once, so a stage that would be
        recomputed as a whole is not.
        """
        options, may_be = self.options(submesh), self._may_be(submesh)
        found = np.full((len(options), 5, *may_be.shape), np.inf)
        handover_s = [self.handover_s(n, submesh, submesh.kind) for n in range(1, found.shape[-1])]
        for prices, option in zip(found, options, strict=True):
            table = self._table(submesh, option)
            prices[[0, 1, 2, 4]] = table[[0, 1, 2, _ONCE]]
            prices[3, :, 1:] = handover_s
            if is_1f1b and option.policy.recompute is Recompute.STAGE:
                starts = np.flatnonzero(may_be[:, -1])
                prices[0, starts, -1] = table[[_FORWARD, _BACKWARD], starts[:, None], -1].sum(1)
        found[..., ~may_be] = np.inf
        return found

    def _may_be(self, submesh: Submesh) -> Numbers:
        """Tell which stages [start, end] there may be on a mesh: their ends are cuts."""
        is_cut = np.isin(np.arange(len(self.names) + 1), [*self._cuts])
        return np.triu(is_cut[:-1, None] & is_cut, 1) & bool(self._shapes(submesh))

    def _shapes(self, submesh: Submesh) -> Sequence[tuple[int, ...]]:
        return self.shapes(submesh, self._hosts[submesh.kind])

    @cached_property
    def _options(self) -> dict[Submesh, Sequence[Option]]:
        return {}

    def _table(self, submesh: Submesh, option: Option) -> Numbers:
        """Return tables of stages: seconds and bytes of a price, and what else `OnMesh` has."""
        key, policy = (self._where(submesh), option), option.policy
        if key in self._tables:
            return self._tables[key]
        # 1. The sums of the layers.
        ranges = self._ranges(submesh, option)
        total_s, forward_s, once_s, *lasting, updates, keeps, enters, layers_s = ranges
        with np.errstate(invalid="ignore"):  # infinite where there is no range
            backward_s = total_s - forward_s
        # 2. What a micro-batch keeps, and the graph that is built again: of one micro-batch, or of
        #    one of its layers.
        graph, kept, stays, again_s = keeps, keeps, sum(lasting), np.zeros_like(keeps)
        if policy.recompute is Recompute.STAGE:
            kept, stays, again_s = enters, stays + graph, forward_s
        elif policy.recompute is not Recompute.NEVER:
            each, share = self._of_layers(submesh, option), policy.share or 1.0
            every: Sequence[int | str] = range(len(each.again_s))
            named = every
            if isinstance(policy.recompute, RecomputeLayers):
                named = policy.recompute.layers
            is_named = np.isin(every, named)
            part_s, freed, graph = (
                _first_of_each(joined, np.where(is_named, own, 0.0), share)
                for joined, own in zip((np.add, np.add, np.maximum), each, strict=True)
            )
            whole_s = _first_of_each(np.add, each.again_s, 1.0)
            np.divide(part_s, whole_s, where=whole_s > 0, out=part_s)
            again_s = np.multiply(layers_s, part_s, where=part_s > 0, out=part_s)
            kept, stays = np.maximum(keeps - freed, enters), stays + graph
        # 3. The fields in order.
        price = forward_s + backward_s + again_s, stays, kept, forward_s, once_s, backward_s
        self._tables[key] = np.stack((*price, *lasting, updates, graph, again_s))
        return self._tables[key]

    def _ranges(self, submesh: Submesh, option: Option) -> Ranges:
        return self._search(submesh, option.shape).of_ranges(option.policy.byte_s)

    def _of_layers(self, submesh: Submesh, option: Option) -> "_OfLayers":
        ranges = self._ranges(submesh, option)
        again_s, graphs, enters = (
            np.diagonal(own, 1) for own in (ranges.again_s, ranges.keeps, ranges.enters)
        )
        return _OfLayers(again_s, (graphs - enters).clip(0), graphs)

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


class _OfLayers(NamedTuple):
    """Of each layer: seconds to recompute it, bytes that this frees, and its graph's bytes with
    what enters it.
    """

    again_s: Numbers
    freed: Numbers
    graphs: Numbers


def _first_of_each(joined: np.ufunc, amounts: Numbers, share: float) -> Numbers:
    """Return the joined amounts of the first share of layers [start, end), as [start, end]."""
    count = len(amounts)
    starts, ends = np.arange(count)[:, None], np.arange(count + 1)
    from_each = np.where(starts < ends, np.append(0.0, amounts), 0.0)
    every = joined.accumulate(from_each, axis=1)
    last = starts + np.ceil(share * (ends - starts)).astype(int)
    found: Numbers = np.where(starts < ends, every[starts, last.clip(0)], 0.0)
    return found
