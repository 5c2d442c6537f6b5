"""Divide the layers of a stage: a program for each kind of layer, and the layouts between them.

    layer 0 ──I──► block ──b──► block ──b──► block ──I──► head      b: each layout that a plan
                                                                     allows between two layers

Layers that do the same between the same layouts are planned once.  The layouts between them are
those of the shortest way through.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise, product

from penstock.costs.graph import Graph
from penstock.errors import PlanError
from penstock.trace.units import bytes_text

from .costs import Costs
from .layouts import I, Layout
from .named import Ready, ready_plan
from .plan import LayerSharding, Sharding
from .program import Borders, Task, plan_layer, routed_calls, why_whole
from .rules import Seen, fits, unknown


def plan_sharding(
    name: str,
    graph: Graph,
    layers: Sequence[str],
    costs: Costs,
    stages: Sequence[Sequence[int]] | None = None,
    memory_limit_bytes: int | None = None,
) -> Sharding:
    """Return a plan for the layers of a model, of these names.

    `stages` are the numbers of the layers of each stage; between stages values are whole.  With a
    limit, weights, gradients, optimizer state and saved activations of a stage stay below it.

    Raises:
        ConfigError: there is no plan of this name.
        PlanError: no plan stays below the limit; says by how much.
    """
    ready, gathers = ready_plan(name)
    found: dict[int, LayerSharding] = {}
    for stage in stages or [range(len(layers))]:
        search = _Search(graph, layers, list(stage), ready, costs)
        found.update(zip(stage, search.within(memory_limit_bytes), strict=True))
    numbers = range(len(layers))
    seen = [Seen.of(graph, call) for n in numbers for call in routed_calls(graph, n)]
    reasons = dict.fromkeys(filter(None, (why_whole(graph, n) for n in numbers)))
    own = tuple(found[n] for n in numbers)
    return Sharding(costs.mesh, own, (*unknown(seen), *reasons), gathers)


class _Search:
    """The search for one stage."""

    def __init__(
        self,
        graph: Graph,
        names: Sequence[str],
        layers: Sequence[int],
        ready: Ready,
        costs: Costs,
    ) -> None:
        self._graph, self._names, self._layers = graph, names, layers
        self._ready, self._costs = ready, costs
        self._whole: Layout = (I,) * len(costs.mesh)
        self._known: dict[object, tuple[LayerSharding, float]] = {}
        self._crossing = [self._between(a, b) for a, b in pairwise(layers)]

    def within(self, limit: int | None) -> list[LayerSharding]:
        """Return the fastest plan that stays below a limit of bytes."""
        found = self._fastest(0.0)
        if limit is None or self._bytes(found) <= limit:
            return found
        low, high = 0.0, _BYTE_S
        while self._bytes(found := self._fastest(high)) > limit:
            low, high = high, high * 10
            if high > _MOST_BYTE_S:
                raise PlanError(
                    f"no way to divide layers {self._names[self._layers[0]]!r} to "
                    f"{self._names[self._layers[-1]]!r} stays below {bytes_text(limit)} on a "
                    f"device: the least found is {bytes_text(round(self._bytes(found)))}. Use "
                    "more shards or stages, recompute, or raise the limit"
                )
        for _ in range(_HALVINGS):
            middle = (low * high) ** 0.5 if low else high / 10
            tried = self._fastest(middle)
            if self._bytes(tried) <= limit:
                high, found = middle, tried
            else:
                low = middle
        return found

    def _bytes(self, plans: Sequence[LayerSharding]) -> float:
        return sum(
            self._costs.layer_bytes(
                self._graph, routed_calls(self._graph, n), self._names[n], plan
            )
            for n, plan in zip(self._layers, plans, strict=True)
        )

    def _fastest(self, byte_s: float) -> list[LayerSharding]:
        """Return the plan that costs least, if bytes cost that much."""
        task = Task(
            costs=self._costs, allow=self._ready.allow, rests=self._ready.rests, byte_s=byte_s
        )
        best: dict[Layout, tuple[float, list[LayerSharding]]] = {self._whole: (0.0, [])}
        for place in range(len(self._layers)):
            further: dict[Layout, tuple[float, list[LayerSharding]]] = {}
            for before, after in product(best, self._borders(place)):
                if self._whole not in (before, after) and before != after:
                    continue
                own, cost = self._one(place, before, after, task)
                total = best[before][0] + cost
                if after not in further or total < further[after][0]:
                    further[after] = total, [*best[before][1], own]
            best = further
        return best[self._whole][1]

    def _borders(self, place: int) -> Iterator[Layout]:
        """Yield the layouts that what a layer gives may have, the same along all axes; what is
        last is whole.
        """
        if place == len(self._layers) - 1 or not self._crossing[place]:
            yield self._whole
            return
        shapes = [self._graph.tensors[n].shape for n in self._crossing[place]]
        mesh = self._costs.mesh
        every = ((state,) * len(mesh) for state in self._ready.borders)
        found = [own for own in every if all(fits(shape, own, mesh) for shape in shapes)]
        yield from found or [self._whole]

    def _one(
        self, place: int, before: Layout, after: Layout, task: Task
    ) -> tuple[LayerSharding, float]:
        layer = self._layers[place]
        entering = self._crossing[place - 1] if place and before != self._whole else []
        leaving = self._crossing[place] if after != self._whole else []
        borders = {**dict.fromkeys(entering, before), **dict.fromkeys(leaving, after)}
        key = self._graph.signature(layer), self._places(layer, borders), task.byte_s
        if key not in self._known:
            name = self._names[layer]
            self._known[key] = plan_layer(self._graph, layer, name, task, borders)
        plan, cost = self._known[key]
        return replace(plan, name=self._names[layer]), cost

    def _places(self, layer: int, borders: Borders) -> tuple[tuple[int, Layout], ...]:
        """Say which tensors of a layer are at its borders, in the order in which it meets them."""
        calls = self._graph.of_layer(layer)
        met = dict.fromkeys(n for call in calls for n in (*call.takes, *call.gives))
        return tuple((k, borders[n]) for k, n in enumerate(met) if n in borders)

    def _between(self, maker: int, user: int) -> list[int]:
        """Return the tensors that one layer gives to the next, and to nobody else."""
        graph = self._graph
        if why_whole(graph, maker) or why_whole(graph, user):
            return []
        made = {n for call in routed_calls(graph, maker) for n in call.gives}
        used = {n for call in routed_calls(graph, user) for n in call.takes}
        own = {id(c) for layer in (maker, user) for c in routed_calls(graph, layer)}
        others = {n for call in graph.calls if id(call) not in own for n in call.takes}
        return sorted((made & used) - others - set(graph.outputs))


_BYTE_S, _MOST_BYTE_S = 1e-13, 1e-4
"""Seconds that a byte counts for: where the search for a limit begins, and where it gives up."""
_HALVINGS = 8
