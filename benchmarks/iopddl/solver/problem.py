"""The problem: one option for each node, costs of pairs, a limit on what is used at any time.

minimise    sum of costs[i][x_i] over nodes i  +  sum of costs[x_i, x_j] over edges (i, j)
such that   at every time t, what the nodes alive at t use sums to at most `limit`
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy
from numpy.typing import NDArray

from penstock.errors import PlanError

Numbers = NDArray[numpy.float64]


class Edge(NamedTuple):
    """What two nodes cost together, by the option of `a` and that of `b`; inf is forbidden."""

    a: int
    b: int
    costs: Numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One choice for each node.

    Attributes:
        costs: for each node the cost of each of its options; inf is forbidden.
        edges: costs of pairs; those of parallel edges add up.
        usages: for each node what each option uses while the node is alive.
        alive: for each node from when (inclusive) to when (exclusive) it is, in whole numbers.
        limit: what may be used at any time.
    """

    costs: Sequence[Numbers]
    edges: Sequence[Edge]
    usages: Sequence[Numbers] = ()
    alive: Sequence[tuple[int, int]] = ()
    limit: float = math.inf

    def __post_init__(self) -> None:
        if not self.limit > 0:
            raise PlanError(f"the limit on usage is {self.limit:g}; it has to be more than 0")


class Value(NamedTuple):
    """What choices cost (inf: one of them is forbidden), and the most that they use at a time."""

    cost: float
    peak: float


def evaluate(problem: Problem, choices: Sequence[int]) -> Value:
    """Compute cost and peak usage of choices; shares no code with the search."""
    cost = sum(float(c[x]) for c, x in zip(problem.costs, choices, strict=True))
    cost += sum(float(e.costs[choices[e.a], choices[e.b]]) for e in problem.edges)
    changes: dict[int, float] = {}
    if problem.usages:
        for usage, (start, end), x in zip(problem.usages, problem.alive, choices, strict=True):
            if start < end:
                changes[start] = changes.get(start, 0.0) + float(usage[x])
                changes[end] = changes.get(end, 0.0) - float(usage[x])
    peak = used = 0.0
    for when in sorted(changes):
        used += changes[when]
        peak = max(peak, used)
    return Value(cost, peak)
