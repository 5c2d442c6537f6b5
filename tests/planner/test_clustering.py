"""Operators are clustered into layers as trying every clustering finds."""

from collections.abc import Sequence
from itertools import combinations, pairwise
from time import perf_counter

import numpy as np
import pytest

from penstock.errors import ConfigError
from penstock.planner.clustering import cluster_operators, received_bytes

Values = Sequence[tuple[int, Sequence[int], float]]


def drawn(seed: int, num_operators: int) -> tuple[list[float], Values]:
    """Return whole seconds, and values that later operators use."""
    random = np.random.default_rng(seed)
    values = []
    for producer in range(-1, num_operators - 1):
        users = random.integers(producer + 1, num_operators, random.integers(1, 4)).tolist()
        values.append((producer, users, float(random.integers(0, 4))))
    return random.integers(0, 4, num_operators).astype(float).tolist(), values


def bytes_into(start: int, end: int, values: Values) -> float:
    """Return what a layer receives: each value from before it that is used in it, once."""
    return sum(
        num_bytes
        for producer, users, num_bytes in values
        if producer < start and any(start <= user < end for user in users)
    )


def score(
    ends: Sequence[int], seconds: Sequence[float], values: Values, most_s: float
) -> tuple[float, float, float] | None:
    """Return what clusterings are compared by; None where a layer takes too long."""
    layers = list(pairwise(ends))
    each_s = [sum(seconds[a:b]) for a, b in layers]
    each_bytes = [bytes_into(a, b, values) for a, b in layers]
    scored = max(each_bytes), sum(each_bytes), sum(own**2 for own in each_s)
    return scored if max(each_s) <= most_s + 1e-9 else None


def test_what_a_layer_receives_is_counted_once() -> None:
    for seed in range(50):
        _, values = drawn(seed, 7)
        received = received_bytes(7, values)
        for start, end in combinations(range(8), 2):
            assert received[start, end] == bytes_into(start, end, values)


def test_clusters_are_those_that_trying_everything_finds() -> None:
    refused = 0
    for seed in range(3000):
        random = np.random.default_rng(seed)
        num_operators = int(random.integers(1, 9))
        num_layers = int(random.integers(1, num_operators + 1))
        delta = float(random.choice((0.0, 0.5, 2.0)))
        seconds, values = drawn(seed, num_operators)
        most_s = (1 + delta) * sum(seconds) / num_layers
        every = (
            score((0, *ends, num_operators), seconds, values, most_s)
            for ends in combinations(range(1, num_operators), num_layers - 1)
        )
        best = min((own for own in every if own is not None), default=None)
        received = received_bytes(num_operators, values)
        if best is None:
            refused += 1
            with pytest.raises(ConfigError, match=f"are no {num_layers} layers of at most"):
                cluster_operators(seconds, received, num_layers, delta=delta)
            continue
        sizes = cluster_operators(seconds, received, num_layers, delta=delta)
        ends = np.cumsum([0, *sizes]).tolist()
        assert len(sizes) == num_layers and min(sizes) > 0
        assert score(ends, seconds, values, most_s) == best
    assert 100 < refused < 2500


def test_thousands_of_operators_take_seconds() -> None:
    seconds, values = drawn(0, 2000)
    began = perf_counter()
    sizes = cluster_operators(seconds, received_bytes(2000, values), 32)
    assert perf_counter() - began < 10
    assert len(sizes) == 32 and sum(sizes) == 2000


def test_more_layers_than_operators_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_layers=3, and there are 2 operators"):
        cluster_operators([1.0, 1.0], received_bytes(2, []), 3)
