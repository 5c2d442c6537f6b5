"""Solve a problem: prices for what is used, linear relaxation, integer programs.

groups      nodes are merged and options removed: exact
prices      the limit becomes a price for what is used at each time, raised where it is over
            the limit and lowered where it is under (subgradient of the Lagrangian dual); a
            sweep chooses for given prices. Gives choices soon, and often a bound
relaxation  gives a bound, and a reduced cost for each state
program     what is left when states go whose reduced cost exceeds a guessed gap; what it
            finds is proven best if its gap is no larger than guessed
"""

import math
import time
from dataclasses import dataclass

import numpy

from penstock.errors import PlanError

from .groups import Graph, Memory
from .integer import Program, Relaxed
from .problem import Numbers, Problem, evaluate
from .sweep import Tables, elimination_order, sweep

_GAP = 1e-9
"""Part of the cost by which it may exceed the bound and count as proven."""
_PRICE_PART = 0.1
"""Part of the time that goes into prices."""
_TURNS, _SWEEPS = 60, 3
"""How often prices change at most, and how often groups are chosen anew for the same ones."""
_GUESSED_GAPS = (0.005, 0.03)
_FACTORS = (1.0, 1.05, 1.2, 2.0, 8.0)
"""By what the prices of the relaxation are raised, one after the other."""
_LEAST_S = 1.0
"""Seconds to find out by how much a limit is too low, even if time is over."""


@dataclass(frozen=True, slots=True)
class Solution:
    """Choices, an option for each node, with their cost.

    Attributes:
        bound: no choices within the limit cost less; None: not known.
        is_proven: the cost exceeds the bound by no more than rounding.
    """

    choices: tuple[int, ...]
    cost: float
    bound: float | None
    is_proven: bool


def solve(problem: Problem, seconds: float, seed: int = 0) -> Solution:
    """Choose an option for each node so that cost is least and usage keeps within the limit.

    A solution that is proven does not depend on the seed or the machine, but for ties; one that
    is not depends on how far the search came in the time, hence on the machine's speed.

    Args:
        problem: costs, edges, usages and the limit.
        seconds: how long to search; what runs is not interrupted at once, so it takes a little
            longer.
        seed: of the orders in which groups are eliminated.

    Raises:
        PlanError: no choices keep within the limit, or none were found in the time.
    """
    search = _Search(problem, time.monotonic() + seconds, seed)
    search.price(time.monotonic() + _PRICE_PART * seconds)
    if not search.is_proven:
        search.program()
    if search.best is None:
        raise PlanError(
            f"no choices within the limit of {problem.limit:,.0f} were found in {seconds:g} s; "
            f"those found use {search.least_peak:,.0f} or more. Give it more time, or raise the "
            "limit"
        )
    bound = search.bound if math.isfinite(search.bound) else None
    return Solution(search.best, search.cost, bound, search.is_proven)


class _Search:
    """The best choices so far, and a bound under all choices."""

    def __init__(self, problem: Problem, until: float, seed: int) -> None:
        self.problem, self.until = problem, until
        self.graph = Graph(problem)
        self.memory = Memory(problem, self.graph)
        self.best: tuple[int, ...] | None = None
        self.cost, self.bound, self.least_peak = math.inf, -math.inf, math.inf
        self.rng = numpy.random.default_rng(seed)
        known = [t for pairs in self.graph.pairs for t in pairs.values()]
        known += [self.graph.costs[k] for k in self.graph.members]
        largest = sum(float(abs(t[numpy.isfinite(t)]).max(initial=0.0)) for t in known)
        self._forbidden = 1.0 + 2.0 * largest  # more than any allowed choices cost
        self._tables: Tables = [
            {
                (min(j, k), max(j, k)): numpy.minimum(m if k < j else m.T, self._forbidden)
                for j, m in pairs.items()
            }
            for k, pairs in enumerate(self.graph.pairs)
        ]

    @property
    def is_proven(self) -> bool:
        return self.best is not None and self.cost - self.bound <= _GAP * abs(self.cost)

    def seconds(self) -> float:
        return max(0.0, self.until - time.monotonic())

    def offer(self, chosen: dict[int, int]) -> Numbers:
        """Keep choices if they fit and are better; return what they use over time."""
        weights = numpy.zeros(self.memory.num_states)
        weights[[self.memory.states[k].start + state for k, state in chosen.items()]] = 1.0
        used = self.memory.used(weights)
        peak, limit = float(used.max(initial=0.0)), self.problem.limit
        if peak <= limit and self._cost(chosen) < min(self.cost, self._forbidden):
            choices = [0] * len(self.problem.costs)
            for k, state in chosen.items():
                for i, option in self.graph.members[k]:
                    choices[i] = int(option[state])
            value = evaluate(self.problem, choices)
            if value.cost < self.cost and value.peak <= limit:
                self.best, self.cost = tuple(choices), value.cost
        self.least_peak = min(self.least_peak, peak)
        return used

    def _cost(self, chosen: dict[int, int]) -> float:
        cost = sum(float(self.graph.costs[k][s]) for k, s in chosen.items())
        for k, tables in enumerate(self._tables):
            cost += sum(float(t[chosen[a], chosen[b]]) for (a, b), t in tables.items() if k == a)
        return cost

    def price(self, until: float) -> None:
        """Raise prices where usage is over the limit, lower them where it is under it."""
        prices = numpy.zeros(len(self.memory.times))
        now: dict[int, int] | None = None
        speed = 1.0
        for _ in range(_TURNS):
            now, value, used = self.sweep(prices, now)
            over = used / self.problem.limit - 1.0
            over[(prices == 0.0) & (over < 0.0)] = 0.0
            if not over.any() or self.is_proven or time.monotonic() > until:
                return
            goal = self.cost if self.best else value + 0.5 * abs(value) + 1.0
            step = speed * max(goal - value, 0.0) / float(over @ over)
            prices = numpy.maximum(0.0, prices + step * over)
            speed *= 0.95

    def sweep(
        self, prices: Numbers, now: dict[int, int] | None
    ) -> tuple[dict[int, int], float, Numbers]:
        """Minimise cost plus price times usage over the limit; repeat where groups are held."""
        paid = self.memory.priced(prices / self.problem.limit)
        unary = {k: self.graph.costs[k] + paid[own] for k, own in self.memory.states.items()}
        for _ in range(_SWEEPS):
            order = elimination_order(self.graph, self.rng)
            now = sweep(self._tables, unary, order, now)
            is_exact = not any(held for _, held in order)
            if is_exact:
                break
        assert now is not None
        used = self.offer(now)
        value = self._cost(now) + float(prices @ (used / self.problem.limit - 1.0))
        if is_exact:
            self.bound = max(self.bound, value)
        return now, value, used

    def program(self) -> None:
        """Solve the relaxation, then integer programs, with rows of memory where they miss."""
        program = Program(self.graph, self.memory)
        while (relaxed := program.relax(self.seconds() + _LEAST_S)) is not None:
            self.bound = max(self.bound, relaxed.value)
            if not program.add_rows(self.memory.used(relaxed.states)):
                break
        if relaxed is None:
            self.raise_if_infeasible(program)
            return
        self._round(program, relaxed)
        gaps = (*_GUESSED_GAPS, math.inf)
        for goal in (relaxed.value + gap * abs(relaxed.value) for gap in gaps):
            if self.is_proven or not self.seconds():
                return
            self._solve_below(program, relaxed, min(goal, self.cost))
        self.raise_if_infeasible(program)

    def _round(self, program: Program, relaxed: Relaxed) -> None:
        """Raise the prices of the relaxation until what a sweep finds keeps within the limit."""
        prices = numpy.zeros(len(self.memory.times))
        prices[program.times] = relaxed.prices
        now = {k: int(relaxed.states[own].argmax()) for k, own in self.memory.states.items()}
        for factor in _FACTORS:
            now, _, used = self.sweep(prices * factor, now)
            if used.max(initial=0.0) <= self.problem.limit or self.is_proven:
                return

    def _solve_below(self, program: Program, relaxed: Relaxed, goal: float) -> None:
        """Find the best choices that cost at most the goal, or that there are none."""
        while seconds := self.seconds():
            weights, bound = program.solve(relaxed, goal, seconds)
            self.bound = max(self.bound, min(bound, goal, self.cost))
            if weights is None:
                program.is_infeasible |= bound == goal == math.inf
                return
            states = self.memory.states.items()
            used = self.offer({k: int(weights[own].argmax()) for k, own in states})
            self.bound = min(self.bound, self.cost)
            if not program.add_rows(used):
                return

    def raise_if_infeasible(self, program: Program) -> None:
        """Raise a PlanError if it is known that nothing keeps within the limit."""
        if not program.is_infeasible or self.best is not None:
            return
        least = program.least_peak(max(_LEAST_S, self.seconds()))
        if least == math.inf:
            raise PlanError(
                "no choices are allowed: forbidden pairs leave nothing; allow more of them"
            )
        limit = self.problem.limit
        raise PlanError(
            f"no choices keep within the limit: at some time at least {least:,.0f} is used, and "
            f"the limit is {limit:,.0f}. Raise it by {max(0.0, least - limit):,.0f} or more, or "
            "give options that use less"
        )
