"""Seconds of collectives within a group of devices: alpha-beta forms over routes.

An algorithm with one level is a ring over n devices.  b is the number of bytes.  alpha is the
longest latency, with the overheads of sender and receiver.  beta is the bandwidth of the slowest
part of the ring; neighbours that pass the same lane share it.

    all-gather, reduce-scatter    (n - 1) (alpha + b / n / beta)
    all-reduce                    both, one after the other
    all-to-all                    (n - 1) rounds, in round r to the device r places on

An algorithm with two levels first runs inside each host.  An all-reduce is then a reduce-scatter
in each host, an all-reduce of each part between hosts, and an all-gather in each host.  The
functions return the seconds of the faster algorithm.  The routes' `collective_s` is added once.

b counts the bytes of a device before an all-reduce, a reduce-scatter or an all-to-all, and after
an all-gather.
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
    """Return the seconds of a collective beside its messages."""
    routes = (cluster.route(a, b) for a, b in pairwise(group))
    return max((route.collective_s for route in routes), default=0.0)


def _gathered_s(cluster: Cluster, group: Sequence[int], num_bytes: float) -> float:
    """Return the seconds of an all-gather's messages, by the faster algorithm."""
    ring_s = _passed_on_s(cluster, [group], num_bytes)
    parts = _alike_on_hosts(cluster, group)
    if parts is None:
        return ring_s
    across = [list(ranks) for ranks in zip(*parts, strict=True)]
    across_s = _passed_on_s(cluster, across, num_bytes / len(parts[0]))
    return min(ring_s, across_s + _passed_on_s(cluster, parts, num_bytes))


def _passed_on_s(cluster: Cluster, rings: Sequence[Sequence[int]], num_bytes: float) -> float:
    """Return the seconds of an all-gather in several rings of equal length that run at once."""
    n = len(rings[0])
    pairs = [(a, b) for ring in rings for a, b in zip(ring, [*ring[1:], ring[0]], strict=True)]
    return (n - 1) * _at_once_s(cluster, pairs, num_bytes / n) if n > 1 else 0.0


def _at_once_s(cluster: Cluster, pairs: Sequence[tuple[int, int]], num_bytes: float) -> float:
    """Return the seconds of transfers at once: the longest latency, and the fullest lane."""
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
    """Return a group as a ring in order of devices, which leaves each host once."""
    if not group or len(set(group)) != len(group):
        raise ConfigError(f"the group {list(group)} is empty or repeats a device; name each once")
    for place in group:
        cluster.device_of(place)
    ordered = sorted(group)
    first = ordered.index(group[0])
    return ordered[first:] + ordered[:first]


def _alike_on_hosts(cluster: Cluster, group: Sequence[int]) -> list[list[int]] | None:
    """Divide a group by hosts; None unless several hosts have equally many of its devices."""
    by_host: dict[int, list[int]] = {}
    for place in group:
        by_host.setdefault(cluster.places[place].host, []).append(place)
    parts = list(by_host.values())
    sizes = {len(part) for part in parts}
    return parts if len(parts) > 1 and len(sizes) == 1 else None
