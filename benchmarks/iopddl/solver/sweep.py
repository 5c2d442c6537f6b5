"""Minimise costs of groups and of pairs, without a limit, by dynamic programming.

Groups are eliminated one after the other: the least cost of group k, for each combination of
states of its neighbours, is a new table of these. A group whose table would be too large is held
at the state that it has, and the others are chosen given that.
"""

import heapq
import math

import numpy

from .groups import Graph
from .problem import Numbers

_LARGEST_TABLE = 100_000
"""Entries of the largest table that eliminating a group may make."""

Tables = list[dict[tuple[int, ...], Numbers]]


def elimination_order(graph: Graph, rng: numpy.random.Generator) -> list[tuple[int, bool]]:
    """Order the groups, smallest table first; True: this one is held instead."""
    size = {k: math.log(len(graph.costs[k])) for k in graph.members}
    near = {k: set(graph.pairs[k]) for k in graph.members}
    weight = {k: size[k] + sum(size[j] for j in near[k]) for k in near}
    noise = dict(zip(near, rng.uniform(0.7, 1.3, len(near)).tolist(), strict=True))
    heap = [(weight[k] * noise[k], k) for k in near]
    largest = [(-weight[k] * noise[k], k) for k in near]
    heapq.heapify(heap)
    heapq.heapify(largest)
    found = []
    while near:
        key, k = heapq.heappop(heap)
        if k not in near or key != weight[k] * noise[k]:
            continue
        held = weight[k] > math.log(_LARGEST_TABLE) and len(near[k]) > 1
        if held:
            heapq.heappush(heap, (key, k))
            k = _heaviest(largest, near, weight, noise)
        found.append((k, held))
        neighbours = near.pop(k)
        for j in neighbours:
            near[j].discard(k)
            weight[j] -= size[k]
            new = set() if held else neighbours - near[j] - {j}
            near[j] |= new
            weight[j] += sum(size[i] for i in new)
            heapq.heappush(heap, (weight[j] * noise[j], j))
    return found


def _put(tables: Tables, unary: dict[int, Numbers], scope: tuple[int, ...], new: Numbers) -> None:
    if len(scope) == 1:
        unary[scope[0]] = unary[scope[0]] + new
    elif scope:
        new = new + tables[scope[0]].get(scope, 0.0)
        for j in scope:
            tables[j][scope] = new


def _take(tables: Tables, k: int) -> list[tuple[tuple[int, ...], Numbers]]:
    """Remove the tables of k; return each with what it is about beside k, and k's axis first."""
    found = []
    for scope, table in tables[k].items():
        axis = scope.index(k)
        others = scope[:axis] + scope[axis + 1 :]
        for j in others:
            del tables[j][scope]
        found.append((others, numpy.moveaxis(table, axis, 0)))
    tables[k] = {}
    return found


def sweep(
    tables: Tables,
    unary: dict[int, Numbers],
    order: list[tuple[int, bool]],
    now: dict[int, int] | None,
) -> dict[int, int]:
    """Choose a state for each group; no worse than `now`, and best where none is held."""
    tables, unary, chosen = [dict(own) for own in tables], dict(unary), {}
    eliminated = []
    for k, held in order:
        own = _take(tables, k)
        if held:
            seen = unary[k] + sum(t.reshape(len(t), -1).min(axis=1) for _, t in own)
            chosen[k] = int(seen.argmin()) if now is None else now[k]
            for others, table in own:
                _put(tables, unary, others, table[chosen[k]])
            continue
        scope = tuple(sorted({j for others, _ in own for j in others}))
        total = unary[k].reshape(-1, *(1 for _ in scope))
        for others, table in own:
            total = total + table.reshape(
                len(table), *(len(unary[j]) if j in others else 1 for j in scope)
            )
        _put(tables, unary, scope, total.min(axis=0))
        eliminated.append((k, unary[k], own))
    for k, costs, own in reversed(eliminated):
        for others, table in own:
            for j in others:
                table = numpy.take(table, chosen[j], axis=1)
            costs = costs + table
        chosen[k] = int(costs.argmin())
    return chosen


def _heaviest(
    heap: list[tuple[float, int]],
    near: dict[int, set[int]],
    weight: dict[int, float],
    noise: dict[int, float],
) -> int:
    """Return a group of about the largest weight; `heap` has their negatives, some outdated."""
    while True:
        key, k = heapq.heappop(heap)
        if k not in near:
            continue
        if -key <= weight[k] * noise[k] * (1 + 1e-9):
            return k
        heapq.heappush(heap, (-weight[k] * noise[k], k))
