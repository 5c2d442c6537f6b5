"""Choose how the calls of a layer are divided: an integer program (Zheng et al. 2022, section 4).

    minimise    seconds of calls and of conversions, forward and backward, and of sums of gradients
    variables   one choice for each call                           0 or 1, their sum is 1
                one state for each weight at rest                  0 or 1, their sum is 1
                e(use, before, after): how a use converts a value  summed over `after` the maker's
                                                                   state, over `before` the user's
                w(value, before, after): a conversion is done      at least e of each use: shared

Values that enter or leave a layer are whole on all devices, or in a layout that its neighbours
agree on.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import product
from math import inf
from operator import attrgetter
from typing import NamedTuple

import numpy

from penstock.costs.counting.graph import Call, Graph, TensorSpec
from penstock.errors import PlanError

from .choose import solve
from .costs import Costs, weights_of
from .layouts import I, Layout, Numbers, S, State
from .letters import Seen
from .plan import Instead, LayerSharding, PlannedCall, conversion_bytes
from .problem import Problem, Side, States
from .routed import own_weights, routed_calls, used_outside
from .rules import ALIKE, Choice, divisions, fits, together


@dataclass(frozen=True)
class Site:
    """A call with its candidates."""

    call: Call
    weights: tuple[bool, ...]
    """True for each argument that is a weight."""
    by_axis: tuple[tuple[Choice, ...], ...]
    """The choices along each axis."""
    options: tuple[PlannedCall, ...] = ()
    """The allowed choices for all axes together."""


Allow = Callable[[Site, int, Choice], bool]
"""Tells if a ready plan allows a choice of a call along an axis."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """The input of all layers' programs: costs and allowed choices; and results they share."""

    costs: Costs
    allow: Allow
    rests: Callable[[TensorSpec, int], Sequence[State]]
    """The states that a weight may have at rest along an axis."""
    pins: Mapping[int, Layout] = field(default_factory=dict)
    """Pinned layouts of weights, by number."""
    known: "dict[int, _Choices]" = field(default_factory=dict)
    """Candidates and their costs, by layer."""
    solved: "dict[bytes, Future[States | None]]" = field(default_factory=dict)
    """Solutions by the digest of a problem: layers often differ only in calls without choices."""

    @property
    def mesh(self) -> tuple[int, ...]:
        """Lengths of the axes."""
        return self.costs.mesh


Borders = Mapping[int, Layout]
"""Layouts that are not whole of tensors that cross between layers, by number."""


class Solved(NamedTuple):
    """A solution of a layer's program."""

    calls: list[PlannedCall]
    """The choice of each call."""
    weights: dict[int, Layout]
    """The layout at rest of each weight, by number."""
    seconds: float
    """Seconds of a micro-batch."""
    cost: float
    """Seconds plus the price of resident bytes."""


_Held = tuple[int | None, Sequence[Layout]]
"""A node, and the layout of a value for each of its states; without a node, its only layout."""
_Conversions = tuple[Side, Sequence[Side], Numbers]
"""The arguments of `Problem.convert`."""


class _Choices:
    """Candidates of a layer's calls, then of its weights, and their costs for any borders."""

    def __init__(self, graph: Graph, layer: int, task: Task) -> None:
        # 1. Find the candidates of the calls and of the weights that are only theirs.
        self._graph, self._task, self._mesh = graph, task, task.mesh
        self.calls = routed_calls(graph, layer)
        self.weights = own_weights(graph, self.calls)
        self.sites = [self._site(call) for call in self.calls]
        self.states = [self._weight_states(n) for n in self.weights]
        # 2. Compute their costs.
        costs, names = task.costs, {graph.tensors[n].name for n in self.weights}
        shared = (spec for spec in weights_of(graph, self.calls) if spec.name not in names)
        self.shared_s = sum(costs.once_s(spec, (I,) * len(self._mesh)) for spec in shared)
        """Seconds of collectives of weights that other layers use too: they are whole in calls."""
        self.seconds: list[Numbers] = [
            *(
                numpy.array([costs.call_s(graph, site.call, x) for x in site.options])
                for site in self.sites
            ),
            *(
                numpy.array([costs.once_s(graph.tensors[n], rest) for rest in states])
                for n, states in zip(self.weights, self.states, strict=True)
            ),
        ]
        # 3. Find the makers and users of all values, and the conversions of those at no border.
        self.outside = used_outside(graph, self.calls)
        """Values that are used outside the layer."""
        self.users: dict[int, list[_Held]] = {}
        """Users of each value, and an empty entry for values that are used outside only."""
        self.makers: dict[int, _Held] = {}
        """The maker of each value, except of values from other layers."""
        for k, site in enumerate(self.sites):
            for place, n in enumerate(site.call.takes):
                self.users.setdefault(n, []).append((k, [x.takes[place] for x in site.options]))
            for place, n in enumerate(site.call.gives):
                self.makers.setdefault(n, (k, [x.gives[place] for x in site.options]))
        self.users |= {n: [] for n in sorted(self.outside - self.users.keys())}
        states_of = enumerate(self.states, len(self.sites))
        self.makers |= dict(zip(self.weights, states_of, strict=True))
        self.inner: dict[int, _Conversions] = {
            n: self.conversions(n, self.makers[n], users)
            for n, users in self.users.items()
            if n in self.makers and n not in self.outside
        }

    def _site(self, call: Call) -> Site:
        weights = tuple(n in self.weights for n in call.takes)
        seen = Seen.of(self._graph, call)
        by_axis = divisions(seen, self._mesh)
        site = Site(call, weights, by_axis)
        allowed = [
            [choice for choice in choices if self._task.allow(site, axis, choice)]
            for axis, choices in enumerate(by_axis)
        ]
        combined = next(filter(None, (together(seen, x, self._mesh) for x in (allowed, by_axis))))
        options = (_planned(call.function, choices) for choices in combined)
        return replace(site, options=tuple(options))

    def _weight_states(self, number: int) -> list[Layout]:
        if number in self._task.pins:
            return [self._task.pins[number]]
        spec = self._graph.tensors[number]
        by_axis = [self._task.rests(spec, axis) for axis in range(len(self._mesh))]
        layouts = [layout for layout in product(*by_axis) if fits(spec.shape, layout, self._mesh)]
        return layouts or [(I,) * len(self._mesh)]

    def conversions(self, tensor: int, maker: "_Held", users: "Sequence[_Held]") -> "_Conversions":
        """Return the conversions of a value between its maker and its users."""
        after_places, before_places = dict[Layout, int](), dict[Layout, int]()
        after = [_side(after_places, *user) for user in users]
        start = _side(before_places, *maker)
        spec, costs = self._graph.tensors[tensor], self._task.costs
        times: float = 1
        if tensor in self.weights:
            times = costs.times(any(tensor in call.saved for call in self.calls))
        seconds = costs.conversions_s(spec, tuple(before_places), tuple(after_places), times=times)
        return start, after, seconds

    @cached_property
    def num_bytes(self) -> list[Numbers]:
        """Resident bytes of each choice of a call, then of each state of a weight."""
        graph, costs = self._graph, self._task.costs
        users = Counter(n for call in self.calls for n in call.saved)
        saved = [
            [costs.saved_bytes(graph, site.call, option, users) for option in site.options]
            for site in self.sites
        ]
        held = [
            [sum(costs.weight_bytes(graph.tensors[n], rest)) for rest in states]
            for n, states in zip(self.weights, self.states, strict=True)
        ]
        return [numpy.array(row) for row in (*saved, *held)]


class LayerProgram:
    """The program of one layer of a graph: nodes are its calls, and then its weights."""

    def __init__(self, graph: Graph, layer: int, task: Task, borders: Borders) -> None:
        self._graph, self._task, self.layer, self.borders = graph, task, layer, borders
        whole = (I,) * len(task.mesh)
        if layer not in task.known:
            task.known[layer] = _Choices(graph, layer, task)
        choices = task.known[layer]
        self.calls, self._weights = choices.calls, choices.weights
        self.sites, self._states = choices.sites, choices.states
        self._begun: dict[float, Future[States | None]] = {}
        self._problem = Problem(dict(enumerate(choices.seconds)))
        for tensor, users in choices.users.items():
            conversions = choices.inner.get(tensor)
            if conversions is None:
                border: _Held = None, [borders.get(tensor, whole)]
                maker = choices.makers.get(tensor, border)
                others = [border] if tensor in choices.outside else []
                conversions = choices.conversions(tensor, maker, [*users, *others])
            self._problem.convert(*conversions)

    def solve(self, byte_s: float = 0.0) -> Solved:
        """Return the best choices if a resident byte costs `byte_s`; a PlanError for none."""
        states, more = self.begin(byte_s).result(), self._more(byte_s)
        if states is None:
            raise PlanError(f"no way to divide layer {self.layer} was found")
        num_sites = len(self.sites)
        seconds = self._problem.cost(states) + self._task.known[self.layer].shared_s
        return Solved(
            [site.options[states[k]] for k, site in enumerate(self.sites)],
            {n: self._states[k][states[num_sites + k]] for k, n in enumerate(self._weights)},
            seconds,
            seconds + sum(float(x[states[k]]) for k, x in enumerate(more)),
        )

    def begin(self, byte_s: float, executor: Executor | None = None) -> "Future[States | None]":
        """Find the states that `solve` returns, in an executor if there is one."""
        if byte_s in self._begun:
            return self._begun[byte_s]
        more, gap, known = self._more(byte_s), _GAP if byte_s else 0.0, self._task.solved
        digest = self._problem.digest(more, gap)
        if digest not in known and executor is not None:
            known[digest] = executor.submit(solve, self._problem, more, gap)
        elif digest not in known:
            known[digest] = Future()
            known[digest].set_result(solve(self._problem, more, gap))
        return self._begun.setdefault(byte_s, known[digest])

    def _more(self, byte_s: float) -> Sequence[Numbers]:
        """Return the price of the bytes of each choice."""
        num_bytes = self._task.known[self.layer].num_bytes if byte_s else []
        return [byte_s * row for row in num_bytes]

    def compared(self, plan: LayerSharding) -> LayerSharding:
        """Return a plan with the next best choice of each call, and the seconds that it adds.

        The next best choice cuts another letter.  All else stays as planned, except layouts of
        weights that only this call uses.
        """
        names = [self._graph.tensors[n].name.removeprefix(f"{plan.name}.") for n in self._weights]
        chosen = [call.choices for call in plan.calls]
        states = {
            k: [option.choices for option in site.options].index(choices)
            for k, (site, choices) in enumerate(zip(self.sites, chosen, strict=True))
        }
        for k, (name, layouts) in enumerate(zip(names, self._states, strict=True)):
            states[len(self.sites) + k] = layouts.index(plan.weights[name])
        calls = (self._compared(k, call, states) for k, call in enumerate(plan.calls))
        return replace(plan, calls=tuple(calls))

    def _compared(self, k: int, chosen: PlannedCall, states: dict[int, int]) -> PlannedCall:
        # 1. Take the costs that change: of the call, and of weights that only it uses.
        used = Counter(n for call in self.calls for n in dict.fromkeys(call.takes))
        only_here = [n for n in self._weights if n in self.calls[k].takes and used[n] == 1]
        weights = [len(self.sites) + self._weights.index(n) for n in only_here]
        costs = self._problem.around({k, *weights})
        now, best = costs.cost(states), Instead((), inf)
        # 2. Try each choice that cuts another letter, with the best layouts of these weights.
        for number, option in enumerate(self.sites[k].options):
            if option.cuts == chosen.cuts:
                continue
            tried = {**states, k: number}
            for node in weights:
                candidates = ({**tried, node: n} for n in range(len(costs.costs[node])))
                tried = min(candidates, key=costs.cost)
            other = Instead(option.choices, costs.cost(tried) - now)
            best = min(best, other, key=attrgetter("more_s"))
        return chosen if best.more_s == inf else replace(chosen, instead=best)


_GAP = 1e-3
"""Relative optimality gap of programs in which bytes have a price."""


_planned = lru_cache(maxsize=1 << 16)(PlannedCall)
"""Makes calls that programs of any meshes and batches share, with the layouts of their choices."""


def _side(places: dict[Layout, int], node: int | None, layouts: Sequence[Layout]) -> Side:
    """Return a side of a conversion; add its new layouts to `places`."""
    which = [places.setdefault(layout, len(places)) for layout in layouts]
    return Side(node, numpy.array(which))


def layers_s(graph: Graph, num_layers: int, costs: Costs) -> list[float]:
    """Return `whole_s` of each layer; layers that do the same are priced once."""
    kinds = [graph.signature(n) for n in range(num_layers)]
    of_kind: dict[str, float] = {}
    for layer, kind in enumerate(kinds):
        if kind not in of_kind:
            of_kind[kind] = whole_s(graph, layer, costs)
    return [of_kind[kind] for kind in kinds]


def whole_s(graph: Graph, layer: int, costs: Costs) -> float:
    """Return the seconds of a replicated layer."""
    alike, whole = (ALIKE,) * len(costs.mesh), (I,) * len(costs.mesh)
    calls = [call for call in graph.of_layer(layer) if not call.is_between]
    weights_s = sum(costs.once_s(spec, whole) for spec in weights_of(graph, calls))
    return sum(costs.call_s(graph, call, PlannedCall("", alike)) for call in calls) + weights_s


def priced(
    graph: Graph,
    name: str,
    costs: Costs,
    calls: Sequence[Call],
    solved: Solved,
    borders: Borders,
) -> LayerSharding:
    """Return the plan of a layer, with the bytes that its calls send for a micro-batch.

    Each conversion counts once.  A value that leaves the layer is converted by the call that makes
    it.  Weights that are gathered once for a step count nothing.
    """
    # 1. Find the values that leave the layer, and the weights that are gathered again.
    layouts, whole = {**borders, **solved.weights}, (I,) * len(costs.mesh)
    leaving = used_outside(graph, calls)
    maker = {n: (k, p) for k, call in enumerate(calls) for p, n in enumerate(call.gives)}
    done: set[tuple[int, Layout, Layout]] = set()
    cut = {n for n, layout in solved.weights.items() if any(isinstance(x, S) for x in layout)}
    again = set() if costs.keeps else cut & {n for call in calls for n in call.saved}
    again &= {
        n
        for call, planned in zip(calls, solved.calls, strict=True)
        for n, after in zip(call.takes, planned.takes, strict=True)
        if after != solved.weights.get(n)
    }
    planned_calls = []

    def sent(tensor: int, after: Layout) -> tuple[int, int]:
        spec, before = graph.tensors[tensor], layouts.get(tensor, whole)
        if (tensor, before, after) in done:
            return 0, 0
        done.add((tensor, before, after))
        forward, backward = conversion_bytes(
            before, after, spec.num_bytes, costs.mesh, has_gradient=spec.wants_gradient
        )
        again_bytes = forward if tensor in again else 0
        return 0 if costs.keeps and tensor in cut else forward, backward + again_bytes

    # 2. Count in the order of calls, so that the first user of a layout pays for the conversion.
    for call, planned in zip(calls, solved.calls, strict=True):
        both = [sent(n, after) for n, after in zip(call.takes, planned.takes, strict=True)]
        layouts.update(zip(call.gives, planned.gives, strict=True))
        both += [sent(n, borders.get(n, whole)) for n in call.gives if n in leaving]
        forward, backward = (sum(column) for column in zip(*both, strict=True))
        changes = tuple(map(call.takes.index, call.changes))
        sent_now = {"forward_bytes": forward, "backward_bytes": backward}
        planned_calls.append(replace(planned, **sent_now, changes=changes))
    # 3. Name the weights as in the layer, and the values at its borders by their places.
    names = {n: graph.tensors[n].name.removeprefix(f"{name}.") for n in solved.weights}
    entering = {n for call in calls for n in call.takes if n not in maker and n in borders}
    return LayerSharding(
        name,
        tuple(planned_calls),
        {names[n]: layout for n, layout in solved.weights.items()},
        {maker[n]: layout for n, layout in borders.items() if n in maker},
        len(entering),
        frozenset(names[n] for n in again),
    )
