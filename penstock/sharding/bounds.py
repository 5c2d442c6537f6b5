"""Lower bounds of a problem's cost with each state of a node: states above a known cost go.

    costs of a     pair a-b      costs of b      The least entries of all tables are a bound of any
     ┌ 3 ┐         ┌ 0 4 ┐        [ 1 0 ]        choice.  A state's costs may move from its node to
     └ 0 ┘         └ 5 0 ┘                       its row of a pair or back: no choice costs another
                                                 sum, and the bound rises.

Sweeps over all nodes, there and back, are sequential tree-reweighted message passing (Kolmogorov
2006); the bound of a problem without cycles is exact.
"""

from collections.abc import Mapping, Sequence

import numpy

from .layouts import Numbers

_ROUNDED = 1e-9
"""Share of a cost below which a difference is rounding."""


class Bounds:
    """The states of nodes that a best choice may have, and a bound of each."""

    def __init__(self, costs: Sequence[Numbers], pairs: Mapping[tuple[int, int], Numbers]) -> None:
        """Copy the costs of the states of nodes and of pairs (i, j), i < j; all are finite."""
        self._costs = [own.copy() for own in costs]
        self._pairs = {pair: table.copy() for pair, table in pairs.items()}
        self._near = [[j for pair in pairs if k in pair for j in pair if j != k] for k in range(len(costs))]
        self.kept: list[Numbers] = [numpy.arange(len(own)) for own in costs]
        """Numbers of each node's states that are left."""
        self.least = [own.copy() for own in costs]
        """The bounds of these states."""

    def tighten(self, most: float) -> None:
        """Sweep over all nodes; drop the states that no choice has which costs `most` or less."""
        nodes = range(len(self._costs))
        least = {(k,): own.min() for k, own in enumerate(self._costs)}
        least |= {pair: table.min() for pair, table in self._pairs.items()}
        for order in (nodes, nodes[::-1]):
            for place, node in enumerate(order):
                # 1. Take from pairs what every choice with a state pays there.
                rows = {k: self._rows(node, k) for k in self._near[node]}
                for table in rows.values():
                    spare = table.min(axis=1, keepdims=True)
                    self._costs[node] += spare[:, 0]
                    table -= spare
                # 2. Drop states by the least of all other tables.
                least |= {(node,): 0.0, **{_pair(node, k): 0.0 for k in rows}}
                self.least[node] = self._costs[node] + sum(least.values())
                self._keep(node, self.least[node] <= most * (1 + _ROUNDED))
                # 3. Give to pairs with later nodes, so that these can take.
                later = {*order[place + 1 :]}.intersection(rows)
                share = 1 / max(len(later), len(rows) - len(later), 1)
                for k in later:
                    table = self._rows(node, k)
                    table += share * self._costs[node][:, None]
                    least[_pair(node, k)] = table.min()
                self._costs[node] *= 1 - share * len(later)
                least[node,] = self._costs[node].min()

    def _rows(self, node: int, other: int) -> Numbers:
        """Return a view of a pair's costs, [state of the node, state of the other]."""
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
