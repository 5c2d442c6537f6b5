"""Speeds of ranks that share the cores of a host, and the cores of this process."""

import os
from collections.abc import Sequence

from penstock.costs.cluster import Cluster
from penstock.simulator import Pool

from .plan import Plan


def shared_cores(
    plan: Plan, cluster: Cluster, places: Sequence[int], busy: float | None
) -> tuple[Pool, ...]:
    """Return a pool for each host whose ranks slow each other down, with the ranks of one replica.

    `places[rank]` is the device of a rank.  `busy` is the measured speed of these layers while all
    cores of the host run them, as a share of alone; None: the host's figures count.
    """
    # 1. Group the ranks of all replicas by host.
    by_host: dict[int, list[int]] = {}
    for rank, place in enumerate(places):
        by_host.setdefault(cluster.places[place].host, []).append(rank)
    placement = plan.placement
    place_of = {placement.rank_of(n): place for n, place in enumerate(placement.places)}
    # 2. Make a pool of each host on which the replica has ranks.
    pools = []
    for ranks in by_host.values():
        places_of_host = tuple(place_of[rank] for rank in ranks if rank in place_of)
        host = cluster.host_of(places[ranks[0]])
        if not places_of_host or not host.busy_speed:
            continue
        host_speeds = host.busy_speed
        at_once = min(len(host_speeds), max(1, len(host.devices) // (plan.threads_per_stage or 1)))
        # Scale the host's figures to the measured speed.  Threads also wait for Python's lock, so
        # processes are no slower than the host's figures.
        if busy is not None and at_once > 1:
            at_least = host_speeds[at_once - 1] if plan.transport.is_between_processes else 0
            host_speeds = _scaled(host_speeds[:at_once], max(busy, at_least))
        # Other replicas run beside this one: each of its ranks stands for several on the host.
        speeds = Pool((), host_speeds)
        share = len(ranks) / len(places_of_host)
        beside = (max(1, round(n * share)) for n in range(1, len(places_of_host) + 1))
        pools.append(Pool(places_of_host, tuple(map(speeds.speed, beside))))
    return tuple(pools)


def _scaled(known: Sequence[float], last: float) -> tuple[float, ...]:
    """Scale the speeds of 1, 2, ... ranks so that the last one is as measured."""
    lost = [1 - speed for speed in known]
    shape: Sequence[float] = lost if lost[-1] > 0 else range(len(known))
    return tuple(1 - (1 - last) * loss / shape[-1] for loss in shape)


def core_numbers() -> tuple[int, ...]:
    """Return the numbers of the cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def num_cores() -> int:
    """Count the cores this process may use."""
    return len(core_numbers())
