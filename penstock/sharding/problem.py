"""Problems: costs of the states of nodes, of pairs of nodes, and of shared conversions."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import NamedTuple

import numpy

from .layouts import Numbers

States = dict[int, int]
"""The state of each node."""


class Side(NamedTuple):
    """One side of a conversion: a value's layout for each state of a node."""

    node: int | None
    """The node; None if the layout is fixed, the first of `which`."""
    which: Numbers
    """Place of the layout, by state."""


class Shared(NamedTuple):
    """Conversions of a value for several users; one that several need is paid once."""

    before: Side
    users: Sequence[Side]
    seconds: Numbers
    """Seconds by [layout before, layout after]."""


@dataclass(slots=True)
class Problem:
    """Costs of the states of nodes, of states of pairs of nodes, and of shared conversions."""

    costs: dict[int, Numbers]
    """Costs of each node's states, by number."""
    pairs: dict[tuple[int, int], Numbers] = field(default_factory=dict)
    shared: list[Shared] = field(default_factory=list)

    def convert(self, before: Side, users: Sequence[Side], seconds: Numbers) -> None:
        """Add the costs of conversions of a value."""
        if len(users) > 1:
            self.shared.append(Shared(before, users, seconds))
            return
        (after,) = users
        table = seconds[before.which][:, after.which]
        if before.node is not None and after.node is not None:
            add(self.pairs, (before.node, after.node), table)
        elif after.node is not None:
            self.costs[after.node] = self.costs[after.node] + table[0]
        elif before.node is not None:
            self.costs[before.node] = self.costs[before.node] + table[:, 0]

    def around(self, nodes: Collection[int]) -> "Problem":
        """Return the part of the costs that depends on the states of some nodes."""
        near = {pair: x for pair, x in self.pairs.items() if not set(nodes).isdisjoint(pair)}
        shared = [x for x in self.shared if any(s.node in nodes for s in (x.before, *x.users))]
        own = {k: x if k in nodes else x * 0 for k, x in self.costs.items()}
        return Problem(own, near, shared)

    def cost(self, states: Mapping[int, int]) -> float:
        total = sum(float(costs[states[k]]) for k, costs in self.costs.items())
        total += sum(float(table[states[i], states[j]]) for (i, j), table in self.pairs.items())
        for before, users, seconds in self.shared:
            row = seconds[_layout(before, states)]
            total += sum(float(row[n]) for n in {_layout(user, states) for user in users})
        return total

    def digest(self, more: Sequence[Numbers], gap: float) -> bytes:
        """Return a digest of all numbers that `solve` reads."""
        sides = [side for own in self.shared for side in (own.before, *own.users)]
        tables = [*self.costs.values(), *self.pairs.values()]
        tables += [*(own.seconds for own in self.shared), *(side.which for side in sides), *more]
        nodes = [*self.pairs], [len(own.users) for own in self.shared], [x.node for x in sides]
        digest = sha256(repr((nodes, [(x.shape, x.dtype.num) for x in tables], gap)).encode())
        for table in tables:
            digest.update(table.tobytes())
        return digest.digest()

    def among(self, kept: Mapping[int, Numbers]) -> "Problem":
        """Return the problem of some states of each node."""

        def only(side: Side) -> Side:
            return side if side.node is None else Side(side.node, side.which[kept[side.node]])

        pairs = {(i, j): x[numpy.ix_(kept[i], kept[j])] for (i, j), x in self.pairs.items()}
        shared = [Shared(only(x.before), [*map(only, x.users)], x.seconds) for x in self.shared]
        return Problem({k: own[kept[k]] for k, own in self.costs.items()}, pairs, shared)


def _layout(side: Side, states: Mapping[int, int]) -> int:
    return int(side.which[0 if side.node is None else states[side.node]])


def add(pairs: dict[tuple[int, int], Numbers], pair: tuple[int, int], table: Numbers) -> None:
    i, j = pair
    if i > j:
        i, j, table = j, i, table.T
    pairs[i, j] = pairs.get((i, j), 0.0) + table
