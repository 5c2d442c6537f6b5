"""Cluster the layers of a model that has more of them than a search for stages wants.

    layers      0 1 2 3 4 5 6 7 8 ...      calls of blocks: as many as the model has
    clusters    └───┘ └─┘ └─────┘          stages are cut at ends of these only

Seconds are those of the graph's operators on one device, forward and backward; bytes those of the
values between layers.  Which layers are a cluster is decided in `penstock.planner.clustering`.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

from penstock.costs.cluster import Device
from penstock.costs.counting.graph import Graph
from penstock.costs.roofline import operator_seconds
from penstock.errors import ConfigError
from penstock.planner.clustering import cluster_operators, received_bytes
from penstock.planner.cuts import balance
from penstock.trace.units import count_text

Spans = Sequence[tuple[int, int]]

MOST_CLUSTERS = 128
"""So many are searched for stages in seconds; of more layers, clusters are made."""
_DELTA = 0.5
"""By what share a cluster may take longer than the mean, or as much more as the longest must."""


def clustered(graph: Graph, spans: Spans, device: Device, num_clusters: int) -> Spans:
    """Return the (start, end) of clusters of layers; those of a span stay together.

    Clusters receive the fewest bytes, and of about as many seconds each; where long layers do not
    allow that, none takes longer than the longest of the best balanced ones.

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
    """Yield each value between spans: the one that makes it, -1 for the model's inputs; those that
    use it; its bytes.
    """
    span_of = [number for number, span in enumerate(spans) for _ in range(*span)]
    for value in graph.values:
        maker = -1 if value.maker < 0 else span_of[value.maker]
        users = (span_of[layer] for layer in value.users)
        yield maker, [user for user in users if user > maker], value.num_bytes
