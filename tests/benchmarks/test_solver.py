"""The solver finds what trying everything finds, within a limit and without one."""

import itertools
import math

import numpy
import pytest

from benchmarks.iopddl.solver import search, sweep
from benchmarks.iopddl.solver.groups import Graph
from benchmarks.iopddl.solver.problem import Edge, Problem, evaluate
from benchmarks.iopddl.solver.search import Solution, solve
from penstock.errors import PlanError

SECONDS = 20.0
SEEDS = range(12)


def tiny(seed: int, limit: float = math.inf, forbidden: float = 0.2) -> Problem:
    """Make a problem of six nodes, with parallel edges, a loop and nodes that never are alive."""
    rng = numpy.random.default_rng(seed)
    sizes = rng.integers(1, 4, 6)
    ends = [*rng.integers(0, 6, (9, 2)).tolist(), [0, 1], [1, 0], [2, 2]]
    edges = []
    for a, b in ends:
        costs = rng.integers(0, 20, (sizes[a], sizes[b])).astype(float)
        costs[rng.random(costs.shape) < forbidden] = math.inf
        edges.append(Edge(a, b, costs))
    alive = [(int(start), int(start + length)) for start, length in rng.integers(0, 4, (6, 2))]
    return Problem(
        costs=[rng.integers(0, 20, size).astype(float) for size in sizes],
        edges=edges,
        usages=[rng.integers(1, 9, size).astype(float) for size in sizes],
        alive=alive,
        limit=limit,
    )


def best_cost(problem: Problem) -> float:
    """Try everything."""
    every = itertools.product(*(range(len(costs)) for costs in problem.costs))
    values = (evaluate(problem, choices) for choices in every)
    return min((v.cost for v in values if v.peak <= problem.limit), default=math.inf)


def solved(problem: Problem) -> tuple[float, Solution | None]:
    """Solve; inf and None if there is no solution."""
    try:
        found = solve(problem, SECONDS)
    except PlanError:
        return math.inf, None
    return evaluate(problem, found.choices).cost, found


def test_cost_and_peak_are_what_they_are_by_hand() -> None:
    problem = Problem(
        costs=[numpy.array([1.0, 2.0]), numpy.array([5.0])],
        edges=[Edge(0, 1, numpy.array([[10.0], [20.0]])), Edge(1, 0, numpy.array([[0.0, 3.0]]))],
        usages=[numpy.array([7.0, 1.0]), numpy.array([4.0])],
        alive=[(0, 2), (1, 3)],
    )
    assert evaluate(problem, (0, 0)) == (16.0, 11.0)
    assert evaluate(problem, (1, 0)) == (30.0, 5.0)


def test_what_ends_when_another_begins_is_not_used_beside_it() -> None:
    usages = [numpy.array([7.0]), numpy.array([4.0]), numpy.array([100.0])]
    problem = Problem(
        costs=[numpy.zeros(1)] * 3, edges=(), usages=usages, alive=[(0, 2), (2, 3), (1, 1)]
    )
    assert evaluate(problem, (0, 0, 0)).peak == 7.0


@pytest.mark.parametrize("limit", [math.inf, 22.0, 16.0, 12.0])
@pytest.mark.parametrize("seed", SEEDS)
def test_the_best_of_all_is_found_and_proven(seed: int, limit: float) -> None:
    problem = tiny(seed, limit)
    cost, found = solved(problem)
    assert cost == best_cost(problem)
    if found is not None:
        assert found.is_proven
        assert found.cost == cost
        assert found.bound == pytest.approx(cost)


def test_limits_of_the_tiny_problems_bind_for_some_and_forbid_some() -> None:
    costs = [
        (best_cost(tiny(s)), best_cost(tiny(s, 16.0)), best_cost(tiny(s, 6.0))) for s in SEEDS
    ]
    assert any(free < bound < math.inf for free, bound, _ in costs)
    assert any(free < math.inf == none for free, _, none in costs)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_integer_program_alone_finds_the_best(seed, monkeypatch) -> None:
    monkeypatch.setattr(search, "_TURNS", 0)
    monkeypatch.setattr(search, "_FACTORS", ())
    problem = tiny(seed, 16.0)
    assert solved(problem)[0] == best_cost(problem)


@pytest.mark.parametrize("seed", SEEDS)
def test_merging_keeps_the_best(seed: int) -> None:
    problem = tiny(seed, forbidden=0.6)
    try:
        graph = Graph(problem)
    except PlanError:
        assert best_cost(problem) == math.inf
        return
    assert sorted(i for members in graph.members.values() for i, _ in members) == list(range(6))
    groups = list(graph.members)
    costs = []
    for states in itertools.product(*(range(len(graph.costs[k])) for k in groups)):
        choices = [0] * 6
        for k, state in zip(groups, states, strict=True):
            for i, option in graph.members[k]:
                choices[i] = int(option[state])
        state_of = dict(zip(groups, states, strict=True))
        cost = sum(graph.costs[k][state_of[k]] for k in groups)
        pairs = ((k, j, t) for k in groups for j, t in graph.pairs[k].items() if k < j)
        cost += sum(table[state_of[k], state_of[j]] for k, j, table in pairs)
        assert cost == evaluate(problem, choices).cost
        costs.append(cost)
    assert min(costs) == best_cost(problem)


def test_a_node_that_follows_from_its_neighbour_is_merged() -> None:
    same = numpy.where(numpy.eye(3) == 1, 0.0, math.inf)
    zeros = numpy.zeros(3)
    problem = Problem(costs=[zeros] * 4, edges=[Edge(i, i + 1, same) for i in range(3)])
    assert len(Graph(problem).members) == 1


def test_a_group_that_is_held_makes_it_no_worse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "_LARGEST_TABLE", 4)
    rng = numpy.random.default_rng(0)
    problem = Problem(
        costs=[rng.random(3) for _ in range(7)],
        edges=[Edge(a, b, rng.random((3, 3))) for a, b in itertools.combinations(range(7), 2)],
    )
    graph = Graph(problem)
    tables: sweep.Tables = [{(min(j, k), max(j, k)): t if k < j else t.T for j, t in pairs.items()}
              for k, pairs in enumerate(graph.pairs)]  # fmt: skip
    now, costs = None, []
    for _ in range(5):
        order = sweep.elimination_order(graph, rng)
        assert any(held for _, held in order)
        now = sweep.sweep(tables, dict(enumerate(graph.costs)), order, now)
        costs.append(evaluate(problem, [now[k] for k in range(7)]).cost)
    assert costs == sorted(costs, reverse=True)


def test_a_limit_below_what_all_use_is_refused_with_what_is_missing() -> None:
    problem = Problem(
        costs=[numpy.zeros(2)] * 2,
        edges=(),
        usages=[numpy.array([30.0, 40.0])] * 2,
        alive=[(0, 2), (1, 3)],
        limit=50.0,
    )
    with pytest.raises(PlanError, match=r"at least 60 is used.*limit is 50\. Raise it by 10"):
        solve(problem, SECONDS)


def test_pairs_that_forbid_everything_are_refused() -> None:
    other = numpy.where(numpy.eye(2) == 1, math.inf, 0.0)  # three neighbours, two colours
    problem = Problem(
        costs=[numpy.zeros(2)] * 3, edges=[Edge(0, 1, other), Edge(1, 2, other), Edge(2, 0, other)]
    )
    with pytest.raises(PlanError, match="forbid"):
        solve(problem, SECONDS)


@pytest.mark.parametrize("limit", [0.0, math.nan])
def test_a_limit_that_is_no_limit_is_refused(limit: float) -> None:
    with pytest.raises(PlanError, match="more than 0"):
        Problem(costs=(), edges=(), limit=limit)


def test_nothing_to_choose_costs_nothing() -> None:
    assert solve(Problem(costs=(), edges=()), SECONDS) == Solution((), 0.0, 0.0, True)
