"""Divide the layers of a stage: a program for each kind of layer, and the layouts between them.

    layer 0 ──I──► block ──b──► block ──b──► block ──I──► head      b: each layout that a plan
                                                                     allows between two layers

Equal layers between equal layouts are planned once.  The shortest path through all layers decides
the layouts between them.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise, product
from math import lcm, prod
from operator import itemgetter
from typing import Any, NamedTuple

import numpy

from penstock.costs.counting.graph import Call, Graph
from penstock.errors import PlanError
from penstock.trace.progress import saying
from penstock.trace.units import bytes_text

from .costs import Costs
from .layouts import I, Layout, Numbers, S
from .named import Ready
from .plan import LayerSharding
from .program import LayerProgram, Task, priced, whole_s
from .routed import between, for_loss, num_operators, routed_calls, whole_bytes, why_whole
from .rules import fits


class Cost(NamedTuple):
    """Seconds of layers, and the total to minimise: seconds plus the price of resident bytes."""

    total: float
    seconds: float


class Ranges(NamedTuple):
    """Costs of layers [first, end) as a stage: arrays by [first, end].

    Seconds of a micro-batch, of its forward, and of collectives that run once a step.  Bytes of a
    device: weights, gradients and optimizer state; what the optimizer moves once a step; what a
    micro-batch keeps and what of it enters.  `again_s` is a forward without the code at the end.
    """

    seconds: Any
    forward_s: Any
    once_s: Any
    weights: Any
    gradients: Any
    optimizer: Any
    updates: Any
    keeps: Any
    enters: Any
    again_s: Any


_NUM_SUMS = 8
"""Entries of `Ranges` that are sums over layers: the first ones."""


class _Plans(NamedTuple):
    """Plans of all layers of a stage, their seconds and their bytes on a device."""

    seconds: float
    num_bytes: float
    plans: list[LayerSharding]


class Part(NamedTuple):
    """A stage."""

    layers: Sequence[int]
    """Numbers of its layers."""
    pins: Mapping[int, Layout] = {}
    """Pinned layouts of weights, by number."""
    before: Sequence[int] | None = None
    """The lengths of the axes of the previous stage's mesh, if there is one."""
    after: Sequence[int] | None = None
    """The same of the next stage's mesh."""
    to_loss: bool = False
    """True if a loss, whose calls are unknown, takes the last layer's output in any slices."""
    has_end: bool = False
    """True if the last of `layers` is the code after the model's last layer, or the loss."""


class Search:
    """The search for one stage."""

    def __init__(
        self,
        graph: Graph,
        names: Sequence[str],
        part: Part,
        ready: Ready,
        costs: Costs,
        *,
        like: "Search | None" = None,
    ) -> None:
        """Begin a search; one that it is `like` is of the same graph, whose facts both share."""
        layers, pins, *around, self._to_loss, self._has_end = part
        self._graph, self._names, self._layers = graph, names, layers
        costs = replace(costs, keeps=ready.keeps, gathers=ready.gathers)
        self._ready, self._costs = ready, costs
        self._one_in_flight = replace(costs, num_in_flight=1)
        self._whole: Layout = (I,) * len(costs.mesh)
        self._task = Task(costs=costs, allow=ready.allow, rests=ready.rests, pins=pins)
        self._programs: dict[object, LayerProgram] = {}
        self._known: dict[object, tuple[LayerSharding, Cost]] = {}
        self._sizes, self._ranges = dict[object, Numbers](), dict[float, Ranges]()
        self._kinds: dict[object, int] = {}
        self._kind, self._layouts = cache(self._kind_of), cache(self._allowed)
        self._calls: Callable[[int], list[Call]] = cache(partial(routed_calls, graph))
        self._why_whole: Callable[[int], str] = cache(partial(why_whole, graph))
        self._issued = cache(lambda n: num_operators(self._calls(n)))
        if like:
            self._calls, self._why_whole, self._issued = like._calls, like._why_whole, like._issued
        beside = [layers[0] - 1, *layers, layers[-1] + 1]
        self._crossing = [self._between(a, b) for a, b in pairwise(beside)]
        """Tensors at each border, ends included, that only the layers beside it make and use."""
        self._around = part.before, part.after
        self._ends = [self._end(place, mesh) for place, mesh in zip((0, -1), around, strict=True)]
        """The layouts of values that enter the stage and that leave it."""
        self._loss_at = len(layers) - self._has_end if self._to_loss or self._has_end else 0
        shapes = [graph.tensors[n].shape for n in self._crossing[self._loss_at] if self._loss_at]
        self._for_loss = for_loss(shapes, self._layouts(self._loss_at), costs.mesh)

    def within(self, limit: int | None) -> list[LayerSharding]:
        """Return the fastest plan within a limit of bytes, of the best plans for prices of a byte.

        seconds │ below ●
                │        ╲     ● a better plan for the price of the line, if there is one:
                │         ╲       it replaces the end on its side of the limit
                │          ● above
                └───────┼──────────── bytes
                      limit
        """
        above = self._fastest(0.0)
        if limit is None or above.num_bytes <= limit:
            return above.plans
        # raise the price of a byte until a plan stays within the limit
        byte_s = _BYTE_S
        while (below := self._fastest(byte_s)).num_bytes > limit:
            above, byte_s = below, byte_s * 100
            if byte_s > _MOST_BYTE_S:
                least = round(below.num_bytes)
                raise PlanError(
                    f"no way to divide layers {self._names[self._layers[0]]!r} to "
                    f"{self._names[self._layers[-1]]!r} stays below {bytes_text(limit)} on a "
                    f"device: the least found is {bytes_text(least)}, {bytes_text(least - limit)} "
                    "more. Use more shards or stages, or raise the limit"
                )
        # the price at which both plans cost the same finds a better one, until there is none
        while below.seconds - above.seconds > _CLOSE * below.seconds:
            byte_s = (below.seconds - above.seconds) / (above.num_bytes - below.num_bytes)
            between = self._fastest(byte_s)
            saved_bytes = below.num_bytes - between.num_bytes
            if below.seconds - between.seconds + byte_s * saved_bytes < _CLOSE * below.seconds:
                break
            above, below = (between, below) if between.num_bytes > limit else (above, between)
        return below.plans

    def compared(self, plans: Sequence[LayerSharding]) -> list[LayerSharding]:
        """Return the plans of all layers with the next best choice of each call."""
        before, known, completed = self._ends[0], dict[object, LayerSharding](), []
        for place, plan in enumerate(plans):
            after = next(iter(plan.leaving.values()), self._whole)
            key = self._kind(place), before, after
            if plan.calls and key not in known:
                program = self._programs[key]  # perhaps of a layer that is alike, with its names
                known[key] = program.compared(replace(plan, name=self._names[program.layer]))
            completed.append(replace(plan, calls=known[key].calls) if plan.calls else plan)
            before = after
        return completed

    def ended(self, plans: Sequence[LayerSharding]) -> list[LayerSharding]:
        """Return the plans, the last one completed with facts about the next stage's mesh."""
        after, mesh = self._around[1], self._costs.mesh
        completed = [*plans]
        if self._ends[1] != self._whole and after is not None:
            multiple = 1 if mesh == after else lcm(prod(mesh), prod(after))
            completed[-1] = replace(completed[-1], multiple=multiple, gives_slices=prod(mesh) == 1)
        return completed

    def begin(self, byte_s: float, executor: Executor) -> None:
        """Start the programs that `of_ranges` needs in an executor."""
        begun, before = set[object](), {self._whole}
        for place in range(len(self._layers)) if byte_s not in self._ranges else ():
            after = {self._whole, *self._borders(place)}
            for ends in self._ways(place, before | {self._cut_here(place)}, after):
                key = self._kind(place), *ends
                if key not in begun and self._divides(place):
                    begun.add(key)
                    self._program(place, *ends).begin(byte_s, executor)
            before = after

    def of_ranges(self, byte_s: float = 0.0) -> "Ranges":
        """Return the costs of ranges of layers as stages, and of the code after the last."""
        if byte_s not in self._ranges:
            with saying(f"dividing layers among {' x '.join(map(str, self._costs.mesh))} devices"):
                self._ranges[byte_s] = self._found(byte_s)
        return self._ranges[byte_s]

    def _found(self, byte_s: float) -> "Ranges":
        count = len(self._layers)
        sums = numpy.full((_NUM_SUMS, count, count + 1), numpy.inf)
        never = numpy.full((1 + _NUM_SUMS, count), numpy.inf)  # [as of `_sized`, first layer]
        best, steps = {self._whole: never.copy()}, dict[object, Numbers]()
        for place in range(count):
            begin, end = (self._cut_here(at) for at in (place, place + 1))
            best.setdefault(begin, never.copy())[:, place] = 0.0
            before, after = (*best,), (*dict.fromkeys((self._whole, *self._borders(place))),)
            key = self._kind(place), before, after, place + 1 == self._loss_at
            if key not in steps:
                steps[key] = self._steps(place, before, after, byte_s=byte_s)
            total = numpy.stack([*best.values()])[:, None] + steps[key]
            fastest = total[:, :, 0].argmin(axis=0)[None, :, None]
            best = dict(zip(after, numpy.take_along_axis(total, fastest, axis=0)[0], strict=True))
            sums[:, : place + 1, place + 1] = best[end][1:, : place + 1]
        both = self._costs.issued(map(self._issued, self._layers), *sums[:2])
        every, again_s = [*both, *sums[2:], self._entering()], both[1]
        if self._has_end:
            every, again_s = [numpy.delete(own[:-1], -2, 1) for own in every], again_s[:-1, :-1]
        return Ranges(*(*every, again_s))

    def _entering(self) -> Numbers:
        """Return the bytes of a micro-batch that enter every range, [first, end].

        A tensor that crosses where the range begins counts as a slice if the border is cut.
        """
        places = {layer: n for n, layer in enumerate(self._layers)}
        entering, parts = numpy.zeros((len(places), len(places) + 1)), prod(self._costs.mesh)
        is_cut = [self._cut_here(place) != self._whole for place in range(len(places))]
        for number, maker, users, num_bytes in self._graph.values:
            uses = [places[user] for user in users if user in places]
            for first in range(places.get(maker, -1) + 1, max(uses, default=-1) + 1):
                is_slice = is_cut[first] and number in self._crossing[first]
                size = num_bytes / (parts if is_slice else 1)
                entering[first, min(user for user in uses if user >= first) + 1 :] += size
        return entering

    def _steps(self, place: int, *sides: Sequence[Layout], byte_s: float) -> Numbers:
        """Return what a layer adds to the best paths: [before, after, as of `_sized`, 1]."""
        steps = numpy.full((*map(len, sides), 1 + _NUM_SUMS, 1), numpy.inf)
        for a, b in self._ways(place, *sides):
            steps[sides[0].index(a), sides[1].index(b)] = self._sized(place, a, b, byte_s)
        return steps

    def _ways(
        self, place: int, before: Iterable[Layout], after: Iterable[Layout]
    ) -> Iterator[tuple[Layout, Layout]]:
        """Yield pairs to try around a layer: one whole, both alike on axis 0, any at a loss."""
        is_any = self._for_loss and place + 1 == self._loss_at
        for both in product(before, after):
            if is_any or self._whole in both or both[0][0] == both[1][0]:
                yield both

    def _sized(self, place: int, before: Layout, after: Layout, byte_s: float) -> Numbers:
        """Return a layer's total to minimise, then the entries of `Ranges` that are sums."""
        key = self._kind(place), before, after, byte_s
        if key not in self._sizes:
            plan, cost = self._one(place, before, after, byte_s)
            layer, graph, one = self._layers[place], self._graph, self._one_in_flight
            calls = self._calls(layer)
            of_layer = graph, calls, self._names[layer], plan
            keeps = one.activation_bytes(graph, calls, plan)
            keeps = keeps if plan.calls else whole_bytes(graph, calls)
            stays, once_s = one.resident_bytes(*of_layer), one.sums_s(*of_layer)
            without_s = cost.seconds - once_s / one.num_microbatches
            forward_s, seconds = one.forward_s(graph, calls, plan, without_s), max(0.0, without_s)
            sums = seconds, forward_s, once_s, *stays, one.update_bytes(*of_layer), keeps
            self._sizes[key] = numpy.array((cost.total, *sums))[:, None]
        return self._sizes[key]

    def _fastest(self, byte_s: float) -> _Plans:
        """Return the plan with the least total for a price of a byte."""
        best = {self._ends[0]: (Cost(0.0, 0.0), list[LayerSharding]())}
        for place in range(len(self._layers)):
            further: dict[Layout, tuple[Cost, list[LayerSharding]]] = {}
            for before, after in self._ways(place, best, self._borders(place)):
                plan, cost = self._one(place, before, after, byte_s)
                total = Cost(*(a + b for a, b in zip(best[before][0], cost, strict=True)))
                if after not in further or total < further[after][0]:
                    further[after] = total, [*best[before][1], plan]
            best = further
        cost, plans = min(best.values(), key=itemgetter(0))
        num_bytes = sum(
            self._costs.layer_bytes(self._graph, self._calls(n), self._names[n], plan)
            for n, plan in zip(self._layers, plans, strict=True)
        )
        return _Plans(cost.seconds, num_bytes, plans)

    def _borders(self, place: int) -> Iterator[Layout]:
        if place == len(self._layers) - 1:
            yield self._ends[1]
        elif not self._crossing[place + 1] or prod(self._costs.mesh) == 1:
            yield self._whole
        else:
            yield from self._layouts(place + 1)
        if place + 1 == self._loss_at:
            yield from self._for_loss

    def _allowed(self, border: int) -> list[Layout]:
        """Return the layouts that the ready plan allows at a border.

        A value stays whole along an axis along which a device would get nothing.
        """
        shapes = [self._graph.tensors[n].shape for n in self._crossing[border]]
        layouts = dict[Layout, None]()
        for wanted in self._ready.layouts(len(self._whole)):
            layout = self._whole
            for axis, state in enumerate(wanted):
                cut = (*layout[:axis], state, *layout[axis + 1 :])
                layout = cut if all(fits(x, cut, self._costs.mesh) for x in shapes) else layout
            layouts[layout] = None
        return [*layouts]

    def _cut_here(self, border: int) -> Layout:
        """Return the layout at a border between two stages of this mesh."""
        is_inner = 0 < border < len(self._layers)
        return self._thinnest(border) if is_inner else self._whole

    def _thinnest(self, border: int) -> Layout:
        """Return the layout at a border, of those allowed, that is cut along most axes."""
        if not self._crossing[border] or prod(self._costs.mesh) == 1:
            return self._whole
        return min(self._layouts(border), key=lambda layout: layout.count(I))

    def _end(self, border: int, other: Sequence[int] | None) -> Layout:
        """Return the layout of values between the stage and one of another mesh beside it."""
        mesh = self._costs.mesh
        lengths = {(*self._graph.tensors[n].shape, 0)[0] for n in self._crossing[border]}
        if mesh == other:
            return self._thinnest(border)
        if other is None or len(lengths) != 1 or S(0) not in self._ready.borders:
            return self._whole
        counts, (samples,) = (prod(mesh), prod(other)), lengths
        may = samples % lcm(*counts) == 0 and samples >= max(counts) > 1
        return (S(0),) * len(self._whole) if may else self._whole

    def _one(
        self, place: int, before: Layout, after: Layout, byte_s: float
    ) -> tuple[LayerSharding, Cost]:
        """Divide one layer; return its plan and cost, which equal layers share."""
        layer = self._layers[place]
        key = self._kind(place), before, after, byte_s
        if key not in self._known and not self._divides(place):
            seconds = whole_s(self._graph, layer, self._costs)
            whole = LayerSharding(self._names[layer], (), {})
            self._known[key] = whole, Cost(seconds, seconds)
        elif key not in self._known:
            program = self._program(place, before, after)
            solved, name = program.solve(byte_s), self._names[program.layer]
            plan = priced(self._graph, name, self._costs, program.calls, solved, program.borders)
            self._known[key] = plan, Cost(solved.cost, solved.seconds)
        plan, cost = self._known[key]
        return replace(plan, name=self._names[layer]), cost

    def _kind_of(self, place: int) -> int:
        """Return a number that layers with the same programs share, in any layouts at borders."""
        layer, pins = self._layers[place], self._task.pins
        # tensors are named by order of first use, as equal layers share
        calls, (entering, leaving) = self._graph.of_layer(layer), self._crossing[place : place + 2]
        met = dict.fromkeys(n for call in calls for n in (*call.takes, *call.gives))
        places = tuple((n in entering, n in leaving, pins.get(n)) for n in met)
        key = self._graph.signature(layer), self._costs.factor(layer), places
        return self._kinds.setdefault(key, len(self._kinds))

    def _divides(self, place: int) -> bool:
        return prod(self._costs.mesh) > 1 and not self._why_whole(self._layers[place])

    def _program(self, place: int, before: Layout, after: Layout) -> LayerProgram:
        if (key := (self._kind(place), before, after)) not in self._programs:
            # the layouts of the tensors that cross the layer's borders
            entering = self._crossing[place] if before != self._whole else []
            leaving = self._crossing[place + 1] if after != self._whole else []
            borders = {**dict.fromkeys(entering, before), **dict.fromkeys(leaving, after)}
            inside = self._graph, self._layers[place], self._task
            self._programs[key] = LayerProgram(*inside, borders)
        return self._programs[key]

    def _between(self, maker: int, user: int) -> list[int]:
        """Return the tensors that one layer makes and only the next one, or the loss, uses."""
        layers, after = [maker, user], len(self._names) - user
        if maker < 0 or (not after and not self._to_loss) or any(map(self._why_whole, layers)):
            return []
        users = self._calls(user) if after else None
        return between(self._graph, self._calls(maker), users, is_end=after <= self._has_end)


_BYTE_S = 1e-13
"""Seconds per byte: the first price in the search for a memory limit."""
_MOST_BYTE_S = 1e-4
"""Seconds per byte: the price above which the search gives up."""
_CLOSE = 1e-3
"""Share by which plans may differ in seconds and count as equal."""
