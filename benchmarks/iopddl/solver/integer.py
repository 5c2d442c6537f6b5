"""The integer program of a problem, and its linear relaxation, for HiGHS.

minimise    costs of states and of pairs of states
variables   x[k, s]        group k is in state s: 0 or 1, their sum over s is 1
            y[k, s, j, r]  an allowed pair: their sum over r is x[k, s], over s it is x[j, r]
rows        what is used at a time is at most the limit; only for times that were found to
            matter, since most rows never do
"""

import math
from typing import Any, NamedTuple

import numpy
from scipy.optimize import Bounds, LinearConstraint, linprog, milp
from scipy.sparse import coo_array, csr_array, hstack

from .groups import Graph, Memory
from .problem import Numbers

_INFEASIBLE = 2
"""What scipy's solvers answer when nothing satisfies the constraints."""


class Relaxed(NamedTuple):
    """What the linear relaxation costs, its weights of states, prices of memory, reduced costs."""

    value: float
    states: Numbers
    prices: Numbers
    reduced: Numbers


class Program:
    """The integer program, with rows of memory only for the times that were found to matter.

    x[k, s]       group k is in state s; they sum to 1 over s
    y[k, j, s, r] pairs that are allowed; they sum to x[k, s] over r, to x[j, r] over s
    """

    def __init__(self, graph: Graph, memory: Memory) -> None:
        self._memory = memory
        self._rows: list[Numbers] = []
        self.times: list[int] = []
        self.is_infeasible = False
        costs = [graph.costs[k] for k in graph.members]
        rows, columns, factors = [], [], []
        height, width = len(graph.members), memory.num_states
        states = {k: numpy.arange(own.start, own.stop) for k, own in memory.states.items()}
        for n, k in enumerate(graph.members):
            size = len(graph.costs[k])
            rows.append(numpy.full(size, n))
            columns.append(states[k])
            factors.append(numpy.ones(size))
        for k in graph.members:
            for j, table in graph.pairs[k].items():
                if j < k:
                    continue
                ends = numpy.nonzero(numpy.isfinite(table))
                costs.append(table[ends])
                for group, end in zip((k, j), ends, strict=True):
                    size = len(graph.costs[group])
                    rows += [height + end, height + numpy.arange(size)]
                    columns += [width + numpy.arange(len(end)), states[group]]
                    factors += [numpy.ones(len(end)), -numpy.ones(size)]
                    height += size
                width += len(ends[0])
        self._costs = numpy.concatenate(costs)
        self._scale = float(numpy.abs(self._costs).max()) * 1e-4 or 1.0
        entries = numpy.concatenate(factors), (numpy.concatenate(rows), numpy.concatenate(columns))
        self._matrix = coo_array(entries, shape=(height, width)).tocsr()
        self._sums = numpy.zeros(height)
        self._sums[: len(graph.members)] = 1.0

    def add_rows(self, used: Numbers) -> bool:
        """Add rows for the times at which the most is over the limit; False: none is."""
        used, reach = used.copy(), len(used) // 30
        limit = self._memory.limit
        found = False
        for _ in range(5):
            if used.max(initial=0.0) <= limit * (1 + 1e-9):
                break
            worst = int(used.argmax())
            used[max(0, worst - reach) : worst + reach + 1] = 0.0
            if worst not in self.times:
                found = True
                self.times.append(worst)
                self._rows.append(self._memory.row(worst) / limit)
        return found

    def _memory_rows(self) -> Any:
        rows = numpy.zeros((len(self._rows), len(self._costs)))
        if self._rows:
            rows[:, : self._memory.num_states] = self._rows
        return csr_array(rows)

    def relax(self, seconds: float) -> Relaxed | None:
        """Solve the linear relaxation; None: not in this time, or nothing satisfies it."""
        found = linprog(
            self._costs / self._scale,
            A_ub=self._memory_rows() if self._rows else None,
            b_ub=numpy.ones(len(self._rows)) if self._rows else None,
            A_eq=self._matrix,
            b_eq=self._sums,
            method="highs",
            options={"time_limit": seconds},
        )
        self.is_infeasible = found.status == _INFEASIBLE
        if found.status:
            return None
        return Relaxed(
            float(found.fun) * self._scale,
            found.x[: self._memory.num_states],
            -found.ineqlin.marginals * self._scale,
            found.lower.marginals * self._scale,
        )

    def solve(self, relaxed: Relaxed, goal: float, seconds: float) -> tuple[Numbers | None, float]:
        """Choose states, without variables that only choices that cost more than `goal` have.

        Their reduced costs are larger than what is between the relaxed value and the goal.

        Returns:
            The weights of states, None if there are none, and a bound under what costs at most
            the goal: inf if nothing does.
        """
        kept = relaxed.reduced <= (goal - relaxed.value) * (1 + 1e-6) + 1e-6 * abs(relaxed.value)
        scale = _scale(relaxed.value)
        constraints = [LinearConstraint(self._matrix[:, kept], self._sums, self._sums)]
        if self._rows:
            constraints.append(LinearConstraint(self._memory_rows()[:, kept], -math.inf, 1.0))
        found = milp(
            self._costs[kept] / scale,
            constraints=constraints,
            integrality=(numpy.arange(len(kept)) < self._memory.num_states)[kept].astype(int),
            bounds=Bounds(0, 1),
            options={"time_limit": seconds, "mip_rel_gap": 0.0},
        )
        bound = -math.inf if found.mip_dual_bound is None else found.mip_dual_bound * scale
        if found.x is None:
            return None, math.inf if found.status == _INFEASIBLE else bound
        x = numpy.zeros(len(kept))
        x[kept] = found.x
        return x[: self._memory.num_states], bound

    def least_peak(self, seconds: float) -> float:
        """Return a bound under the peak of all choices, for the times that have rows; inf: none.

        A variable more, the peak as a part of the limit, is all that is minimised.
        """
        width = len(self._costs)
        rows = hstack([self._memory_rows(), numpy.full((len(self._rows), 1), -1.0)])
        sums = hstack([self._matrix, csr_array((len(self._sums), 1))])
        objective = numpy.zeros(width + 1)
        objective[-1] = 1.0
        upper = numpy.append(numpy.ones(width), math.inf)
        found = milp(
            objective,
            constraints=[
                LinearConstraint(sums.tocsr(), self._sums, self._sums),
                LinearConstraint(rows.tocsr(), -math.inf, 0.0),
            ],
            integrality=(numpy.arange(width + 1) < self._memory.num_states).astype(int),
            bounds=Bounds(0, upper),
            options={"time_limit": seconds, "mip_rel_gap": 1e-4},
        )
        if found.status == _INFEASIBLE:
            return math.inf
        return (found.mip_dual_bound or 0.0) * self._memory.limit


def _scale(value: float) -> float:
    """Return a unit of costs in which a value is about a million, as HiGHS's tolerances want."""
    return abs(value) * 1e-6 or 1.0
