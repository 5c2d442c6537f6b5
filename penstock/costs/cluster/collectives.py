"""Seconds of collectives within a group of devices: alpha-beta forms over routes.

One way is a ring over the group; n devices, b bytes, alpha the longest latency (with the overheads
of sender and receiver) and beta the bytes a second of the slowest part of the ring, where
neighbours that pass the same lane share it:

    all-gather, reduce-scatter    (n - 1) (alpha + b / n / beta)
    all-reduce                    both, one after the other
    all-to-all                    (n - 1) rounds, in round r to the device r places on

The other is in two levels, where devices of one host talk to each other first: for an all-reduce,
a reduce-scatter in each host, an all-reduce of each part between the hosts, all parts at once, and
an all-gather in each host.  What is returned is the way that takes less.

Each takes as long again as the routes' `collective_s` says, once.

b is what each device has before an all-reduce, a reduce-scatter or an all-to-all, and after an
all-gather.
"""

import math
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from penstock.errors import ConfigError

from .cluster import Cluster


def all_reduce_s(cluster: Cluster, group: Sequence[int], num_bytes: float) -> float:
    """Return the seconds until each device of a group has the sum of what all have."""
    group = _checked(cluster, group)
    return _begun_s(cluster, group) + 2 * _gathered_s(cluster, group, num_bytes)


def all_gather_s(cluster: Cluster, group: Sequence[int], num_bytes: float) -> float:
    """Return the seconds until each device has all parts of a value, `num_bytes` together."""
    group = _checked(cluster, group)
    return _begun_s(cluster, group) + _gathered_s(cluster, group, num_bytes)


def reduce_scatter_s(cluster: Cluster, group: Sequence[int], num_bytes: float) -> float:
    """Return the seconds until each device has its part of the sum of `num_bytes`."""
    return all_gather_s(cluster, group, num_bytes)  # the same messages, the other way


def all_to_all_s(cluster: Cluster, group: Sequence[int], num_bytes: float) -> float:
    """Return the seconds until each device has sent an equal part of `num_bytes` to each."""
    group = _checked(cluster, group)
    n = len(group)
    rounds = ([(a, group[(i + r) % n]) for i, a in enumerate(group)] for r in range(1, n))
    each_s = (_at_once_s(cluster, pairs, num_bytes / n) for pairs in rounds)
    return _begun_s(cluster, group) + sum(each_s)


def _begun_s(cluster: Cluster, group: Sequence[int]) -> float:
    """Return what a collective takes beside its messages."""
    routes = (cluster.route(a, b) for a, b in pairwise(group))
    return max((route.collective_s for route in routes), default=0.0)


def _gathered_s(cluster: Cluster, group: Sequence[int], num_bytes: float) -> float:
    """Return the seconds of the messages of an all-gather: in one ring, or in two levels."""
    ring_s = _passed_on_s(cluster, [group], num_bytes)
    parts = _alike_on_hosts(cluster, group)
    if parts is None:
        return ring_s
    across = [list(ranks) for ranks in zip(*parts, strict=True)]
    across_s = _passed_on_s(cluster, across, num_bytes / len(parts[0]))
    return min(ring_s, across_s + _passed_on_s(cluster, parts, num_bytes))


def _passed_on_s(cluster: Cluster, rings: Sequence[Sequence[int]], num_bytes: float) -> float:
    """Return the seconds until each device of each ring has had what all others have.

    All rings run at once, and share lanes.  Each is as long as the others.
    """
    n = len(rings[0])
    pairs = [(a, b) for ring in rings for a, b in zip(ring, [*ring[1:], ring[0]], strict=True)]
    return (n - 1) * _at_once_s(cluster, pairs, num_bytes / n) if n > 1 else 0.0


def _at_once_s(cluster: Cluster, pairs: Sequence[tuple[int, int]], num_bytes: float) -> float:
    """Return the seconds until the last of several transfers, begun together, is there: the
    longest latency, and the bytes at the least rate that one gets of a lane.
    """
    routes = [cluster.route(a, b) for a, b in pairs]
    users = Counter(lane for route in routes for lane in route.lanes)
    latency_s = max(route.latency_s + 2 * route.overhead_s for route in routes)
    shares = (
        bytes_per_s / users[lane]
        for route in routes
        for lane, bytes_per_s in zip(route.lanes, route.lane_bytes_per_s, strict=True)
    )
    return latency_s + num_bytes / min(shares, default=math.inf)


def _checked(cluster: Cluster, group: Sequence[int]) -> list[int]:
    """Refuse a group that has a device twice; return it in order of devices, the first one first.

    A ring over devices in order leaves each host once.
    """
    if not group or len(set(group)) != len(group):
        raise ConfigError(f"the group {list(group)} is empty or repeats a device; name each once")
    for place in group:
        cluster.device_of(place)
    ordered = sorted(group)
    first = ordered.index(group[0])
    return ordered[first:] + ordered[:first]


def _alike_on_hosts(cluster: Cluster, group: Sequence[int]) -> list[list[int]] | None:
    """Divide a group by hosts; None unless there are several, with as many devices of each."""
    by_host: dict[int, list[int]] = {}
    for place in group:
        by_host.setdefault(cluster.places[place].host, []).append(place)
    parts = list(by_host.values())
    sizes = {len(part) for part in parts}
    return parts if len(parts) > 1 and len(sizes) == 1 else None
