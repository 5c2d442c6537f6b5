"""The cheapest states of a problem are found, whatever its size."""

import itertools
from collections.abc import Mapping
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from penstock.costs.counting.count import record_graph
from penstock.model.layer_list import as_layers
from penstock.sharding.choose import solve
from penstock.sharding.costs import Costs
from penstock.sharding.named import ready_plan
from penstock.sharding.problem import Problem, Side
from penstock.sharding.program import LayerProgram, Task
from tests.sharding.cases_transformers import SHAPE, llama

RING = ((0, 1), (1, 2, 3), (2, 4), (3, 4, None), (4, 5), (5, 6), (None, 0, 6))
"""Nodes in a ring with chords, values with one user, several and fixed ends."""
BLOCK = ((None, 0, 6), (0, 1), (1, 2, 3, 4), (2, 5), (3, 5), (4, 5), (5, 6), (6, 7, None))
"""Queries, keys and values of one product meet again, and so do branches of a residual."""


@pytest.mark.parametrize("ends", [RING, BLOCK], ids=["ring", "block"])
@pytest.mark.parametrize("seed", range(12))
def test_the_best_of_all_states_is_found(seed: int, ends: Any, monkeypatch) -> None:
    """That of a block needs no linear program.  In some rings, bounds drop states before it."""
    monkeypatch.setattr("penstock.sharding.choose._FEW", 1 + 7 * (seed % 3 == 0))
    if ends is BLOCK:
        monkeypatch.setattr("penstock.sharding.choose._Table.solve", pytest.fail)
    rng = numpy.random.default_rng(seed)
    sizes = rng.integers(1, 4, len(ends)).tolist()
    problem = Problem({k: rng.integers(0, 9, n).astype(float) for k, n in enumerate(sizes)})

    def side(node: int | None) -> Side:
        return Side(node, rng.integers(0, 3, 1 if node is None else sizes[node]))

    for first, *users in ends:
        seconds = rng.integers(0, 9, (3, 3)).astype(float)
        problem.convert(side(first), [side(user) for user in users], seconds)
    more = (
        [rng.integers(0, 9, n).astype(float) for n in sizes] if seed % 2 and ends is RING else []
    )
    added = more or [numpy.zeros(n) for n in sizes]

    def cost(states: Mapping[int, int]) -> float:
        return problem.cost(states) + sum(own[states[k]] for k, own in enumerate(added))

    found = solve(problem, more, 0.0)
    assert found is not None
    every = itertools.product(*map(range, sizes))
    assert cost(found) == pytest.approx(min(cost(dict(enumerate(own))) for own in every))


def test_only_problems_of_the_same_numbers_have_the_same_digest() -> None:
    def problem(
        cost: float, layout: int, sent: float, users: int, pair: tuple[int, int]
    ) -> Problem:
        found = Problem({k: numpy.array([cost, 2.0]) for k in range(4)})
        sides = [Side(n, numpy.array([0, layout])) for n in range(1, 1 + users)]
        found.convert(Side(0, numpy.array([0, 1])), sides, numpy.array([[0.0, sent], [1.0, 0.0]]))
        found.pairs[pair] = numpy.ones((2, 2))
        return found

    same: Any = {"cost": 1.0, "layout": 1, "sent": 3.0, "users": 2, "pair": (2, 3)}
    others = {"cost": 1.5, "layout": 0, "sent": 4.0, "users": 3, "pair": (1, 3)}
    own = problem(**same).digest((), 0.0)
    assert own == problem(**same).digest((), 0.0)
    changed = [problem(**{**same, name: other}).digest((), 0.0) for name, other in others.items()]
    more = [numpy.array([0.0, 1.0])] * 4
    changed += [problem(**same).digest((), 1e-3), problem(**same).digest(more, 0.0)]
    assert len({own, *changed}) == 1 + len(changed)


def test_a_block_of_llama_is_planned_along_three_axes(monkeypatch) -> None:
    """A rotated query has hundreds of candidates on 2 x 2 x 2; without bounds that never ends.

    On 2 x 2 it does, and costs as much.
    """
    x = torch.randn(SHAPE, requires_grad=True)
    graph = record_graph(as_layers([nn.Identity(), llama()]), x)

    def solved(mesh: tuple[int, ...]) -> tuple[float, int]:
        ready = ready_plan("grid+sequence")
        task = Task(costs=Costs.usual(mesh), allow=ready.allow, rests=ready.rests)
        program = LayerProgram(graph, 1, task, {})
        return program.solve().seconds, max(len(site.options) for site in program.sites)

    three_axes_s, count = solved((2, 2, 2))
    assert count > 300
    bounded_s, _ = solved((2, 2))
    assert bounded_s < three_axes_s  # a layer so small waits for what it sends
    monkeypatch.setattr("penstock.sharding.choose._FEW", 100)
    assert bounded_s == pytest.approx(solved((2, 2))[0], rel=1e-9)
