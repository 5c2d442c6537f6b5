"""Seconds of each kind of collective, of one group of devices."""

from collections.abc import Callable, Sequence

from penstock.costs.cluster import Cluster
from penstock.costs.cluster.collectives import Collective, collective_s

OfOneGroup = Callable[[Cluster, Sequence[int], float], float]


def _of(kind: Collective) -> OfOneGroup:
    return lambda cluster, group, num_bytes: collective_s(cluster, [group], kind, num_bytes)


all_reduce_s = _of(Collective.ALL_REDUCE)
all_gather_s = _of(Collective.ALL_GATHER)
reduce_scatter_s = _of(Collective.REDUCE_SCATTER)
all_to_all_s = _of(Collective.ALL_TO_ALL)
