"""The cores that ranks share: those of this process, and how fast each computes beside others."""

import os
from collections.abc import Sequence

from penstock.costs.cluster import Cluster
from penstock.simulator import Pool

from .plan import Plan


def shared_cores(
    plan: Plan, cluster: Cluster, places: Sequence[int], busy: float | None
) -> tuple[Pool, ...]:
    """Return the hosts whose ranks slow each other down, as one replica sees them.

    `places[rank]` is the device of a rank.  `busy` is how fast these layers run while all cores of
    the host are busy with them, if that was measured; else the host's own figures count.  It was
    measured in threads, which wait for Python's lock as well: processes are no slower than that,
    nor than the host's figures.
    """
    by_host: dict[int, list[int]] = {}
    for rank, place in enumerate(places):
        by_host.setdefault(cluster.places[place].host, []).append(rank)
    placement = plan.placement
    place_of = {placement.rank_of(n): place for n, place in enumerate(placement.places)}
    found = []
    for ranks in by_host.values():
        mine = tuple(place_of[rank] for rank in ranks if rank in place_of)
        host = cluster.host_of(places[ranks[0]])
        if not mine or not host.busy_speed:
            continue
        known = host.busy_speed
        at_once = min(len(known), max(1, len(host.devices) // (plan.threads_per_stage or 1)))
        if busy is not None and at_once > 1:
            at_least = known[at_once - 1] if plan.transport.is_between_processes else 0
            known = _scaled(known[:at_once], max(busy, at_least))
        speeds = Pool((), known)
        share = len(ranks) / len(mine)
        beside = (max(1, round(n * share)) for n in range(1, len(mine) + 1))
        found.append(Pool(mine, tuple(map(speeds.speed, beside))))
    return tuple(found)


def _scaled(known: Sequence[float], last: float) -> tuple[float, ...]:
    """Return how fast each of 1, 2, ... ranks is if the last number is as fast as was measured:
    what they lose grows as the host says, and by even steps where it says that they lose nothing.
    """
    lost = [1 - speed for speed in known]
    shape: Sequence[float] = lost if lost[-1] > 0 else range(len(known))
    return tuple(1 - (1 - last) * each / shape[-1] for each in shape)


def core_numbers() -> tuple[int, ...]:
    """Return the numbers of the cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def num_cores() -> int:
    """Count the cores this process may use."""
    return len(core_numbers())
