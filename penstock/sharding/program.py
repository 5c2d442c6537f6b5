"""Choose how the calls of a layer are divided: an integer program (Zheng et al. 2022, section 4).

    minimise    seconds of calls and of conversions, forward and backward, and of sums of gradients
    variables   one choice for each call                           0 or 1, their sum is 1
                one state for each weight at rest                  0 or 1, their sum is 1
                e(use, before, after): how a use converts a value  summed over `after` the maker's
                                                                   state, over `before` the user's
                w(value, before, after): a conversion is done      at least e of each use: shared

What enters a layer and what leaves it is whole on all devices, or in a layout that its neighbours
agree on.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import NamedTuple

import numpy
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from penstock.costs.graph import Call, Graph, TensorSpec
from penstock.errors import PlanError

from .costs import Costs
from .in_place import may_change
from .layouts import I, Layout, State
from .plan import LayerSharding, PlannedCall, conversion_bytes
from .rules import Choice, Seen, divisions, fits


@dataclass(frozen=True)
class Site:
    """A call with what may be chosen for it along each axis; `weights` says which of what it takes
    are weights.
    """

    call: Call
    weights: tuple[bool, ...]
    by_axis: tuple[tuple[Choice, ...], ...]

    @cached_property
    def options(self) -> list[PlannedCall]:
        """All that may be chosen: one of each axis."""
        return [PlannedCall(self.call.function, own) for own in product(*self.by_axis)]


Allow = Callable[[Site, int, Choice], bool]
"""Tells which choices a ready plan leaves to a call along an axis."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is asked of a program: prices, and what may be chosen.

    `rests` gives the states that a weight of some shape may have at rest along an axis, `pins` the
    layouts of some by number.  A byte that stays on a device counts as much as `byte_s` seconds of
    a micro-batch.
    """

    costs: Costs
    allow: Allow
    rests: Callable[[TensorSpec, int], Sequence[State]]
    pins: Mapping[int, Layout] = field(default_factory=dict)
    byte_s: float = 0.0

    @property
    def mesh(self) -> tuple[int, ...]:
        """Lengths of the axes."""
        return self.costs.mesh


Borders = Mapping[int, Layout]
"""By number, tensors that cross from one layer to another in a layout that is not whole."""


class _Use(NamedTuple):
    """A value as number `place` of what a call takes; without a call, as what the layer gives."""

    tensor: int
    site: int | None
    place: int = 0


class Solved(NamedTuple):
    """A choice for each call, the layout of each weight by number, and what they cost together."""

    calls: list[PlannedCall]
    weights: dict[int, Layout]
    cost: float


@dataclass(slots=True)
class _Rows:
    """Linear constraints, row by row."""

    entries: list[tuple[int, int, float]] = field(default_factory=list)
    lowest: list[float] = field(default_factory=list)
    highest: list[float] = field(default_factory=list)

    def add(self, terms: Sequence[tuple[int, float]], low: float, high: float) -> None:
        row = len(self.lowest)
        self.entries += [(row, variable, factor) for variable, factor in terms]
        self.lowest.append(low)
        self.highest.append(high)


class LayerProgram:
    """The program of one layer of a graph."""

    def __init__(self, graph: Graph, layer: int, task: Task, borders: Borders) -> None:
        self._graph, self._task, self._layer, self.borders = graph, task, layer, borders
        self.mesh = task.mesh
        self.whole = (I,) * len(self.mesh)
        calls = routed_calls(graph, layer)
        self._weights = own_weights(graph, calls)
        self.sites = [self._site(call) for call in calls]
        self.sites_calls = calls
        self.maker = {n: k for k, site in enumerate(self.sites) for n in site.call.gives}
        self.costs: list[float] = []
        self._is_whole: list[bool] = []
        self._rows = _Rows()
        users = Counter(n for call in calls for n in call.saved)
        self.choice = [self._one_of(self._site_costs(site, users)) for site in self.sites]
        self.states = {n: self._weight_states(n) for n in self._weights}
        self.at_rest = {
            n: self._one_of([self._weight_cost(graph.tensors[n], rest) for rest in states])
            for n, states in self.states.items()
        }
        self.shared: dict[tuple[int, Layout, Layout], int] = {}
        for use in self._uses():
            self._convert(use)

    def solve(self) -> "Solved":
        """Return a choice for each call, the layout of each weight by number, and the seconds.

        Raises:
            PlanError: the solver finds none.
        """
        if not self.sites:
            return Solved([], {}, 0.0)
        rows, columns, factors = (numpy.array(x) for x in zip(*self._rows.entries, strict=True))
        shape = len(self._rows.lowest), len(self.costs)
        found = milp(
            numpy.array(self.costs),
            constraints=LinearConstraint(
                coo_array((factors, (rows, columns)), shape=shape).tocsc(),
                numpy.array(self._rows.lowest),
                numpy.array(self._rows.highest),
            ),
            integrality=numpy.array(self._is_whole, dtype=int),
            bounds=Bounds(0, 1),
        )
        if found.x is None:
            raise PlanError(f"no way to divide layer {self._layer} was found: {found.message}")
        return Solved(
            [
                s.options[_chosen(found.x, own)]
                for s, own in zip(self.sites, self.choice, strict=True)
            ],
            {n: self.states[n][_chosen(found.x, own)] for n, own in self.at_rest.items()},
            float(found.fun),
        )

    # -- what there is to choose ------------------------------------------------------------------

    def _site_costs(self, site: Site, users: Mapping[int, int]) -> list[float]:
        task, graph = self._task, self._graph
        saved = [
            task.costs.saved_bytes(graph, site.call, option, users) if task.byte_s else 0.0
            for option in site.options
        ]
        return [
            task.costs.call_s(site.call, option) + task.byte_s * num_bytes
            for option, num_bytes in zip(site.options, saved, strict=True)
        ]

    def _weight_cost(self, spec: TensorSpec, rest: Layout) -> float:
        costs = self._task.costs
        return costs.sum_s(spec, rest) + self._task.byte_s * costs.weight_bytes(spec, rest)

    def _site(self, call: Call) -> Site:
        weights = tuple(n in self._weights for n in call.takes)
        found = divisions(Seen.of(self._graph, call), self.mesh)
        site = Site(call, weights, found)
        kept = (
            tuple(choice for choice in own if self._task.allow(site, axis, choice))
            for axis, own in enumerate(found)
        )
        return replace(site, by_axis=tuple(kept))

    def _weight_states(self, number: int) -> list[Layout]:
        if number in self._task.pins:
            return [self._task.pins[number]]
        spec = self._graph.tensors[number]
        by_axis = [self._task.rests(spec, axis) for axis in range(len(self.mesh))]
        found = [own for own in product(*by_axis) if fits(spec.shape, own, self.mesh)]
        return found or [self.whole]

    def _uses(self) -> Iterator[_Use]:
        for k, site in enumerate(self.sites):
            for place, tensor in enumerate(site.call.takes):
                yield _Use(tensor, k, place)
        for tensor in sorted(used_outside(self._graph, self.sites_calls)):
            yield _Use(tensor, None)

    # -- variables and rows -----------------------------------------------------------------------

    def _variable(self, cost: float, *, is_whole: bool = False) -> int:
        self.costs.append(cost)
        self._is_whole.append(is_whole)
        return len(self.costs) - 1

    def _one_of(self, costs: Sequence[float]) -> list[int]:
        found = [self._variable(cost, is_whole=True) for cost in costs]
        self._rows.add([(n, 1.0) for n in found], 1.0, 1.0)
        return found

    def _before(self, tensor: int) -> dict[Layout, list[int]]:
        """Return by state the variables that say that a value is in it; none: it always is."""
        if tensor in self.at_rest:
            pairs = zip(self.states[tensor], self.at_rest[tensor], strict=True)
            return {state: [variable] for state, variable in pairs}
        if tensor not in self.maker:
            return {self.borders.get(tensor, self.whole): []}
        k = self.maker[tensor]
        place = self.sites[k].call.gives.index(tensor)
        return _by_layout((c.gives[place] for c in self.sites[k].options), self.choice[k])

    def _after(self, use: _Use) -> dict[Layout, list[int]]:
        if use.site is None:
            return {self.borders.get(use.tensor, self.whole): []}
        options = self.sites[use.site].options
        return _by_layout((c.takes[use.place] for c in options), self.choice[use.site])

    def _convert(self, use: _Use) -> None:
        before, after = self._before(use.tensor), self._after(use)
        cells = {(b, a): self._variable(0.0) for b in before for a in after}
        for side, known in ((0, before), (1, after)):
            for state, variables in known.items():
                own = [(cell, 1.0) for key, cell in cells.items() if key[side] == state]
                fixed = 0.0 if variables else 1.0
                self._rows.add([*own, *((n, -1.0) for n in variables)], fixed, fixed)
        for (b, a), cell in cells.items():
            if b != a:
                self._rows.add([(self._done(use.tensor, b, a), 1.0), (cell, -1.0)], 0.0, 1.0)

    def _done(self, tensor: int, before: Layout, after: Layout) -> int:
        key = tensor, before, after
        if key not in self.shared:
            cost = self._task.costs.conversion_s(self._graph.tensors[tensor], before, after)
            self.shared[key] = self._variable(cost)
        return self.shared[key]


def plan_layer(
    graph: Graph, layer: int, name: str, task: Task, borders: Borders
) -> tuple[LayerSharding, float]:
    """Divide one layer, and return what it costs; `name` is its name in the model.

    Raises:
        PlanError: nothing that is allowed fits together.
    """
    if why_whole(graph, layer):
        return LayerSharding(name, (), {}), _whole_s(graph, layer, task.costs)
    program = LayerProgram(graph, layer, task, borders)
    solved = program.solve()
    return priced(graph, name, task.mesh, program.sites_calls, solved, borders), solved.cost


def _whole_s(graph: Graph, layer: int, costs: Costs) -> float:
    alike = (Choice((), ()),) * len(costs.mesh)
    own = (call for call in graph.of_layer(layer) if not call.is_between)
    return sum(costs.call_s(call, PlannedCall("", alike)) for call in own)


def priced(
    graph: Graph,
    name: str,
    mesh: Sequence[int],
    calls: Sequence[Call],
    solved: Solved,
    borders: Borders,
) -> LayerSharding:
    """Count what the calls of a layer send: each conversion once, those of what leaves it with the
    calls that make it.
    """
    whole, leaving = (I,) * len(mesh), used_outside(graph, calls)
    maker = {n: (k, p) for k, call in enumerate(calls) for p, n in enumerate(call.gives)}
    layouts = {**borders, **solved.weights}
    done: set[tuple[int, Layout, Layout]] = set()
    found = []

    def sent(tensor: int, after: Layout) -> tuple[int, int]:
        spec, before = graph.tensors[tensor], layouts.get(tensor, whole)
        if (tensor, before, after) in done:
            return 0, 0
        done.add((tensor, before, after))
        return conversion_bytes(
            before, after, spec.num_bytes, mesh, has_gradient=spec.wants_gradient
        )

    for call, planned in zip(calls, solved.calls, strict=True):
        both = [sent(n, after) for n, after in zip(call.takes, planned.takes, strict=True)]
        layouts.update(zip(call.gives, planned.gives, strict=True))
        both += [sent(n, borders.get(n, whole)) for n in call.gives if n in leaving]
        forward, backward = (sum(column) for column in zip(*both, strict=True))
        changes = tuple(map(call.takes.index, call.changes))
        sent_now = {"forward_bytes": forward, "backward_bytes": backward}
        found.append(replace(planned, **sent_now, changes=changes))
    names = {n: graph.tensors[n].name.removeprefix(f"{name}.") for n in solved.weights}
    entering = {n for call in calls for n in call.takes if n not in maker and n in borders}
    return LayerSharding(
        name,
        tuple(found),
        {names[n]: own for n, own in solved.weights.items()},
        {maker[n]: own for n, own in borders.items() if n in maker},
        len(entering),
    )


def routed_calls(graph: Graph, layer: int) -> list[Call]:
    """Return the calls inside a layer's own call that work on what it is given or on its weights.

    All others make what they make of nothing, or of buffers, on each device alike.
    """
    found: list[Call] = []
    free = {n for n, spec in enumerate(graph.tensors) if spec.name and not spec.wants_gradient}
    for call in graph.of_layer(layer):
        if call.is_between:
            continue
        if call.function and set(call.takes) - free:
            found.append(call)
        else:
            free.update(call.gives)
    return found


def own_weights(graph: Graph, calls: Sequence[Call]) -> list[int]:
    """Return the parameters that these calls use, and no other ones."""
    own = {id(call) for call in calls}
    others = {n for call in graph.calls if id(call) not in own for n in call.takes}
    return [
        n
        for n in dict.fromkeys(n for call in calls for n in call.takes)
        if graph.tensors[n].name and graph.tensors[n].wants_gradient and n not in others
    ]


def used_outside(graph: Graph, calls: Sequence[Call]) -> set[int]:
    """Return what these calls make that others use, or the model gives."""
    own = {id(call) for call in calls}
    others = (n for call in graph.calls if id(call) not in own for n in call.takes)
    return {*others, *graph.outputs} & {n for call in calls for n in call.gives}


def why_whole(graph: Graph, layer: int) -> str:
    """Say why a layer is better done by all devices alike; "" if it may be divided.

    What is changed in place may be seen through another view of it, of which a device may hold
    another part.
    """
    routed = {id(call) for call in routed_calls(graph, layer)}
    for call in graph.of_layer(layer):
        if call.is_between:
            continue
        if call.changes and id(call) in routed and not may_change(graph, call):
            return f"{call.function} changes a tensor in place"
        if not call.function:
            return "code that no function of torch shows"
    return ""


def _by_layout(states: Iterator[Layout], variables: Sequence[int]) -> dict[Layout, list[int]]:
    found: dict[Layout, list[int]] = {}
    for state, variable in zip(states, variables, strict=True):
        found.setdefault(state, []).append(variable)
    return found


def _chosen(
    values: "numpy.ndarray[tuple[int], numpy.dtype[numpy.float64]]", own: Sequence[int]
) -> int:
    return max(range(len(own)), key=lambda n: float(values[own[n]]))
