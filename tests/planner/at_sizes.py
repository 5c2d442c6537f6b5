"""What layers do with a micro-batch: values that tests share."""

import numpy as np

from penstock.costs.records import AtSize, LayerKind, Value
from penstock.planner.stage_bytes import MODEL_INPUT


def kind(inner_bytes: int, left_bytes: int) -> LayerKind:
    return LayerKind(operators=(), inner_bytes=inner_bytes, left_bytes=left_bytes)


def drawn(seed: int) -> AtSize:
    """Return layers that give, take and save values at random; some share storages."""
    random = np.random.default_rng(seed)
    num_layers = int(random.integers(1, 7))
    kinds = tuple(kind(*random.integers(0, 50, 2).tolist()) for _ in range(3))
    values = []
    for number in range(int(random.integers(1, 9))):
        producer = int(random.integers(MODEL_INPUT, num_layers))
        later = [n for n in range(producer + 1, num_layers) if random.random() < 0.5]
        is_weight = bool(later) and producer >= 0 and random.random() < 0.2
        storage = int(random.integers(0, number + 1))
        num_bytes = int(random.integers(1, 1000))
        has_gradient = random.random() < 0.7
        values.append(Value(producer, tuple(later), num_bytes, storage, has_gradient, is_weight))
    saved = []
    for layer in range(num_layers):
        touched = [n for n, v in enumerate(values) if layer in (v.producer, *v.consumers)]
        saved.append(tuple(n for n in touched if random.random() < 0.5))
    return AtSize(
        microbatch_size=1,
        kinds=kinds,
        kind_of=tuple(random.integers(0, 3, num_layers).tolist()),
        values=tuple(values),
        saved=tuple(saved),
        loss=kind(7, 3) if random.random() < 0.5 else None,
    )


def chain(num_layers: int, *skips: tuple[int, int]) -> AtSize:
    """Return layers that save what comes in, 10 bytes each, and 100 inside; `skips` are values
    of 1 byte from one layer to a later one.
    """
    values = [Value(n - 1, (n,) if n < num_layers else (), 10, n) for n in range(num_layers + 1)]
    values += [Value(a, (b,), 1, 50 + n) for n, (a, b) in enumerate(skips)]
    return AtSize(
        microbatch_size=1,
        kinds=(kind(100, 5),),
        kind_of=(0,) * num_layers,
        values=tuple(values),
        saved=tuple((n,) for n in range(num_layers)),
    )
