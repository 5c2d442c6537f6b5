"""Say why a call is not divided in another way: what the next best would cost, all else unchanged.

A weight that only this call uses may be held in another layout with it.
"""

from dataclasses import replace

from penstock.costs.graph import Graph

from .layouts import Layout
from .plan import Instead, LayerSharding, PlannedCall
from .program import Borders, LayerProgram, Task, used_outside


class Neighbours:
    """The ways to divide a layer that differ from what was planned in one call."""

    def __init__(
        self, graph: Graph, layer: int, plan: LayerSharding, task: Task, borders: Borders
    ) -> None:
        self._program = program = LayerProgram(graph, layer, task, borders)
        self._plan, self._leaving = plan, used_outside(graph, program.sites_calls)
        names = {n: graph.tensors[n].name.removeprefix(f"{plan.name}.") for n in program.states}
        self._weights = {n: plan.weights[name] for n, name in names.items()}
        self._users: dict[int, list[tuple[int, int]]] = {}
        for k, site in enumerate(program.sites):
            for place, tensor in enumerate(site.call.takes):
                self._users.setdefault(tensor, []).append((k, place))

    def named(self) -> LayerSharding:
        """Return the plan with the next best way of each call: one that cuts something else."""
        calls = tuple(self._named(k, chosen) for k, chosen in enumerate(self._plan.calls))
        return replace(self._plan, calls=calls)

    def _named(self, k: int, chosen: PlannedCall) -> PlannedCall:
        options = self._program.sites[k].options
        costs = {n: self._cost(k, n) for n, own in enumerate(options) if own.cuts != chosen.cuts}
        if not costs:
            return chosen
        own = next(n for n, option in enumerate(options) if option.choices == chosen.choices)
        best = min(costs, key=lambda n: costs[n])
        more_s = costs[best] - self._cost(k, own)
        return replace(chosen, instead=Instead(options[best].choices, more_s))

    def _cost(self, k: int, number: int) -> float:
        """Return the seconds of all that depends on a call's choice."""
        site, option = self._program.sites[k], self._program.sites[k].options[number]
        found = self._program.costs[self._program.choice[k][number]]
        for tensor in dict.fromkeys((*site.call.takes, *site.call.gives)):
            pairs = self._at(tensor, k, option)
            found += min(s + self._conversions(tensor, own, k, option) for own, s in pairs)
        return found

    def _at(self, tensor: int, k: int, option: PlannedCall) -> list[tuple[Layout, float]]:
        """Return the layouts in which a tensor may be, and what each costs."""
        program, made = self._program, self._program.maker.get(tensor)
        if made is not None:
            planned = option if made == k else self._plan.calls[made]
            place = program.sites[made].call.gives.index(tensor)
            return [(planned.gives[place], 0.0)]
        if tensor not in program.at_rest:
            return [(program.borders.get(tensor, program.whole), 0.0)]
        states, variables = program.states[tensor], program.at_rest[tensor]
        every = [(state, program.costs[n]) for state, n in zip(states, variables, strict=True)]
        if len(self._users[tensor]) == 1:
            return every
        return [pair for pair in every if pair[0] == self._weights[tensor]]

    def _conversions(self, tensor: int, before: Layout, k: int, option: PlannedCall) -> float:
        program, users = self._program, self._users.get(tensor, [])
        calls = [(option if user == k else self._plan.calls[user], place) for user, place in users]
        after = {planned.takes[place] for planned, place in calls}
        if tensor in self._leaving:
            after.add(program.borders.get(tensor, program.whole))
        shared = (program.shared[tensor, before, own] for own in after - {before})
        return sum(program.costs[n] for n in shared)
