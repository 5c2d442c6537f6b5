"""Cluster operators into layers, as Alpa does (Zheng et al., OSDI 2022, section 5.2), and many
layers into fewer.

    operators   0  1  2  3  4  5  6  7       in topological order, K of them
    layers      └──────┘  └──┘  └─────┘      L of them, of about as many seconds each

    G(k, r) = min over i of  max(G(i, r - 1), C(i, k))      the first k operators in r layers

C(i, k) are the bytes that the layer of operators [i, k) receives from earlier operators.  A layer
takes at most (1 + delta) / L of all seconds.  Ties in G are broken by the sum of C, then by the
sum of the squares of the layers' seconds.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.costs.cluster import Cluster
from penstock.costs.cluster.hosts import Device
from penstock.costs.counting.graph import Graph
from penstock.costs.roofline import operator_seconds
from penstock.errors import ConfigError, check_count
from penstock.trace.progress import saying
from penstock.trace.units import count_text

from .cuts import Spans, balance

_Numbers = NDArray[Any]
MOST_CLUSTERS = 128
"""Layers that a search for stages handles in seconds; more are clustered."""
_DELTA = 0.5
"""Share by which a cluster may exceed the mean seconds, unless a longer layer demands more."""
_ROUNDING = 1e-9
"""Seconds and bytes that differ by less, as a share, are equal."""


def received_bytes(
    num_operators: int, values: Sequence[tuple[int, Sequence[int], float]]
) -> _Numbers:
    """Return C as [start, end].

    `values` are (operator that makes it or -1, operators that use it, bytes).  A layer receives a
    value once, however many of its operators use it.
    """
    at_end = np.zeros((num_operators + 1,) * 2)
    # A value counts at its first user in the layer: layers that start after the user before,
    # and, by the sum over ends, all that end later.
    for producer, users, num_bytes in values:
        before = producer
        for user in sorted(set(users)):
            at_end[before + 1 : user + 1, user + 1] += num_bytes
            before = user
    received: _Numbers = at_end.cumsum(axis=1)
    return received


def cluster_operators(
    seconds: Sequence[float], received: _Numbers, num_layers: int, *, delta: float = 0.5
) -> tuple[int, ...]:
    """Return the operators per layer; `received[start, end]` are the bytes C.  A ConfigError says
    that there are fewer operators than layers, or no layers keep to their seconds.

    The dynamic program takes two passes of K^2 L steps.
    """
    num_operators, total = len(seconds), float(sum(seconds))
    if not 1 <= num_layers <= num_operators:
        raise ConfigError(
            f"num_layers={num_layers}, and there are {num_operators} operators; choose between 1 "
            "and as many layers as operators"
        )
    # 1. Make layers that take too long impossible.
    most_s = (1 + delta) * total / num_layers
    upto_s = np.concatenate([[0.0], np.cumsum(seconds)])
    layer_s = upto_s - upto_s[:, None]
    bytes_in = np.where(layer_s <= most_s * (1 + _ROUNDING), received, np.inf)
    # 2. Find the least possible greatest C.
    (greatest,), _ = _program([bytes_in], num_layers, np.maximum)
    if greatest == np.inf:
        raise ConfigError(
            f"operators of {total:.3g} s are no {num_layers} layers of at most {most_s:.3g} s: "
            f"the longest takes {max(seconds):.3g} s; choose fewer layers or more than {delta=}"
        )
    # 3. Among layers within it, minimise the sum of C, then the sum of squared seconds.
    bytes_in[bytes_in > greatest * (1 + _ROUNDING)] = np.inf
    _, ends = _program([bytes_in, layer_s**2], num_layers, np.add)
    return tuple(end - start for start, end in pairwise(ends))


def _program(
    costs: Sequence[_Numbers], num_layers: int, join: Callable[[_Numbers, _Numbers], _Numbers]
) -> tuple[list[float], list[int]]:
    """Return the least costs of all operators, joined over layers, and the ends of these layers.

    Later `costs` break ties of earlier ones.  A layer with infinite first costs is impossible.
    """
    size = len(costs[0])
    best = np.full((len(costs), num_layers + 1, size), np.inf)
    best[:, 0, 0] = 0.0
    cut = np.zeros((num_layers + 1, size), dtype=int)
    rows = np.arange(num_layers)
    # Forward: the best last layer for each end and number of layers.
    for end in range(1, size):
        can = np.flatnonzero(np.isfinite(costs[0][:end, end]))
        if not len(can):
            continue
        values = [join(best[n][:-1, can], cost[can, end]) for n, cost in enumerate(costs)]
        at = _least_of_rows(values)
        best[:, 1:, end] = [value[rows, at] for value in values]
        cut[1:, end] = can[at]
    # Backward: follow the cuts from the last operator.
    ends = [size - 1]
    for layer in range(num_layers, 0, -1):
        ends.append(int(cut[layer, ends[-1]]))
    return best[:, num_layers, -1].tolist(), ends[::-1]


def _least_of_rows(values: Sequence[_Numbers]) -> _Numbers:
    """Return the place of the least in each row: by the first values, then by the others."""
    among = np.isfinite(values[0])
    for value in values:
        candidates = np.where(among, value, np.inf)
        among &= candidates <= candidates.min(axis=1, keepdims=True) * (1 + _ROUNDING)
    places: _Numbers = among.argmax(axis=1)
    return places


def cluster_layers(
    graph: Graph, spans: Spans, cluster: Cluster, num_layers: int | None = None
) -> Spans:
    """Return the (start, end) of layers that stay together: `spans`, or clusters of them, if
    `num_layers` asks for it, or if there are many.  Fewer layers than asked for are a
    ConfigError.
    """
    if num_layers is not None:
        check_count("num_layers", num_layers)
    elif len(spans) > MOST_CLUSTERS:
        num_layers = MOST_CLUSTERS
    if num_layers is None:
        return spans
    with saying(f"clustering {len(spans)} layers into {num_layers}"):
        return clustered(graph, spans, cluster.device_of(0), num_layers)


def clustered(graph: Graph, spans: Spans, device: Device, num_clusters: int) -> Spans:
    """Return the (start, end) of clusters of spans that receive the fewest bytes.

    Clusters take about the same time.  If a long layer does not allow that, none takes longer than
    the longest of the best balanced clusters.

    Raises:
        ConfigError: there are fewer spans than clusters.
    """
    if num_clusters > len(spans):
        raise ConfigError(
            f"num_layers={num_clusters}, and the model has {count_text(len(spans), 'layer')} that "
            "may be parted; ask for no more than that, leave it out, or name finer blocks with "
            "penstock.capture(model, inputs, blocks=[...])"
        )
    seconds = [sum(_seconds(graph, range(*span), device)) for span in spans]
    upto = [0.0, *accumulate(seconds)]
    evenest = pairwise(accumulate(balance(seconds, num_clusters), initial=0))
    longest_s, mean_s = max(upto[b] - upto[a] for a, b in evenest), upto[-1] / num_clusters
    delta = max(_DELTA, longest_s / mean_s - 1) if mean_s else _DELTA
    received = received_bytes(len(spans), [*_values(graph, spans)])
    sizes = cluster_operators(seconds, received, num_clusters, delta=delta)
    starts = [spans[first][0] for first in accumulate(sizes[:-1], initial=0)]
    return [*pairwise((*starts, spans[-1][1]))]


def _seconds(graph: Graph, layers: Sequence[int], device: Device) -> Iterator[float]:
    for layer in layers:
        for call in graph.of_layer(layer):
            yield from (operator_seconds(operator, device) for operator in call.operators)


def _values(graph: Graph, spans: Spans) -> Iterator[tuple[int, list[int], float]]:
    """Yield each value: the span that makes it (-1: an input), spans that use it, its bytes."""
    span_of = [number for number, span in enumerate(spans) for _ in range(*span)]
    for value in graph.values:
        maker = -1 if value.maker < 0 else span_of[value.maker]
        users = (span_of[layer] for layer in value.users if layer < len(span_of))  # or the loss
        yield maker, [user for user in users if user > maker], value.num_bytes
