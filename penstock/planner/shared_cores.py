"""The cores that ranks share: how much slower each is beside others, and whose turn it is.

Threads of one process take turns where they are more than cores, as the executor makes them;
between processes all run at once, and the system shares the cores out.
"""

from collections.abc import Sequence

from penstock.costs.cluster import Cluster
from penstock.interval import likely
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
    own = set(plan.placement.peers_in(0))
    found = []
    for ranks in by_host.values():
        mine = tuple(rank for rank in ranks if rank in own)
        host = cluster.host_of(places[ranks[0]])
        if not mine or not host.busy_speed:
            continue
        at_once = max(1, len(host.devices) // (plan.threads_per_stage or 1))
        known = [likely(speed) for speed in host.busy_speed]
        measured = busy
        if plan.transport.is_between_processes and busy is not None and at_once <= len(known):
            measured = max(busy, known[at_once - 1])
        speeds = Pool((), _speeds(known, at_once, measured))
        share = len(ranks) / len(mine)
        beside = (max(1, round(n * share)) for n in range(1, len(mine) + 1))
        takes_turns = len(ranks) > at_once and not plan.transport.is_between_processes
        turns = at_once if takes_turns else None
        turn_s = 0.0 if turns is None else cluster.route(places[0], places[-1]).latency_s
        found.append(Pool(mine, tuple(map(speeds.speed, beside)), turns, turn_s))
    return tuple(found)


def _speeds(known: Sequence[float], at_once: int, busy: float | None) -> tuple[float, ...]:
    """Return how fast each of 1, 2, ... ranks is: as the host says, or, with `busy`, so much
    faster or slower that those who can run at once are as fast as was measured; by even steps
    where the host slows none of them down.
    """
    if busy is None or at_once < 2 or len(known) < at_once:
        return tuple(known)
    if known[at_once - 1] >= 1:
        return tuple(1 - (1 - busy) * n / (at_once - 1) for n in range(at_once))
    ratio = (1 - busy) / (1 - known[at_once - 1])
    return tuple(1 - (1 - speed) * ratio for speed in known[:at_once])
