"""Lower bounds of a problem's cost with each state of a node: states above a known cost go.

    costs of a     pair a-b      costs of b      The least entries of all tables are a bound of any
     ┌ 3 ┐         ┌ 0 4 ┐        [ 1 0 ]        choice.  A state's costs may move from its node to
     └ 0 ┘         └ 5 0 ┘                       its row of a pair or back: no choice costs another
                                                 sum, and the bound rises.

Sweeps over all nodes, there and back, are sequential tree-reweighted message passing (Kolmogorov
2006).  Each user of a shared conversion pays a share of its own, and what one does not need for
its bound is for the others.
"""

from typing import Any

import numpy

from .layouts import Numbers
from .problem import Problem, Side

_ROUNDED = 1e-9
"""Share of a cost below which a difference is rounding."""


class Bounds:
    """The states of nodes that a best choice may have, and a bound of each."""

    def __init__(self, problem: Problem) -> None:
        """Begin with all states of a problem; its costs are finite and not negative."""
        alone = Problem(dict(problem.costs), dict(problem.pairs))
        self._shares: list[tuple[Side, list[tuple[Side, Numbers]]]] = []
        """Conversions between nodes: the maker, and users with their shares of its seconds."""
        for before, users, seconds in problem.shared:
            shares = [(user, seconds / len(users)) for user in users]
            for user, share in shares:
                alone.convert(before, [user], share)
            if before.node is not None:
                self._shares.append((before, [own for own in shares if own[0].node is not None]))
        self._costs = {k: own.copy() for k, own in alone.costs.items()}
        self._pairs = {pair: table.copy() for pair, table in alone.pairs.items()}
        self._near = {
            k: [j for pair in self._pairs if k in pair for j in pair if j != k]
            for k in self._costs
        }
        self.kept: dict[int, Numbers] = {k: numpy.arange(len(x)) for k, x in self._costs.items()}
        """Numbers of each node's states that are left."""
        self.least = {k: own.copy() for k, own in self._costs.items()}
        """The bounds of these states."""

    @property
    def num_states(self) -> int:
        """The number of states that are left of all nodes."""
        return sum(map(len, self.kept.values()))

    def first(self, count: int) -> dict[int, Numbers]:
        """Return the numbers of so many states of each node, those with the least bounds."""
        order = {k: least.argsort(kind="stable") for k, least in self.least.items()}
        return {k: kept[numpy.sort(order[k][:count])] for k, kept in self.kept.items()}

    def tighten(self, most: float) -> None:
        """Sweep over all nodes; drop the states that no choice has which costs `most` or less."""
        nodes = [*self._costs]
        least: dict[tuple[int, ...], Any] = {}
        least |= {(k,): own.min() for k, own in self._costs.items()}
        least |= {pair: table.min() for pair, table in self._pairs.items()}
        for order in (nodes, nodes[::-1]):
            for place, node in enumerate(order):
                # 1. Take from pairs what every choice with a state pays there.
                near = self._near[node]
                for table in (self._rows(node, k) for k in near):
                    spare = table.min(axis=1)
                    self._costs[node] += spare
                    table -= spare[:, None]
                # 2. Drop states, by the least of all other tables.
                least |= dict.fromkeys([(node,), *(_pair(node, k) for k in near)], 0.0)
                self.least[node] = self._costs[node] + sum(least.values())
                self._keep(node, self.least[node] <= most * (1 + _ROUNDED))
                # 3. Give to pairs with later nodes, so that these can take.
                later = {*order[place + 1 :]}.intersection(near)
                share = 1 / max(len(later), len(near) - len(later), 1)
                for k in later:
                    table = self._rows(node, k)
                    table += share * self._costs[node][:, None]
                    least[_pair(node, k)] = table.min()
                self._costs[node] *= 1 - share * len(later)
                least[node,] = self._costs[node].min()
        self._share()

    def _share(self) -> None:
        """Divide evenly what users of a conversion can spare of their shares, by its layouts."""
        for before, shares in self._shares:
            rows, spared = self._layouts(before)[:, None], list[Numbers]()
            for user, share in shares:
                table, columns = self._rows(before.node, user.node), self._layouts(user)
                spare = share.copy()  # all of it where no state is left
                numpy.minimum.at(spare, (rows, columns), table)
                table -= spare[rows, columns]
                share -= spare
                spared.append(spare)
            even: Any = sum(spared) / max(len(spared), 1)
            for user, share in shares:
                share += even
                table = self._rows(before.node, user.node)
                table += even[rows, self._layouts(user)]

    def _layouts(self, side: Side) -> Numbers:
        assert side.node is not None
        return side.which[self.kept[side.node]]

    def _rows(self, node: int | None, other: int | None) -> Numbers:
        """Return a view of a pair's costs, [state of the node, state of the other]."""
        assert node is not None and other is not None
        return self._pairs[node, other] if node < other else self._pairs[other, node].T

    def _keep(self, node: int, which: Numbers) -> None:
        if which.all():
            return
        self._costs[node], self.least[node] = self._costs[node][which], self.least[node][which]
        self.kept[node] = self.kept[node][which]
        for other in self._near[node]:
            pair = _pair(node, other)
            self._pairs[pair] = self._pairs[pair].compress(which, axis=pair.index(node))


def _pair(i: int, j: int) -> tuple[int, int]:
    return min(i, j), max(i, j)
