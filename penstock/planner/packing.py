"""Place stages on hosts: which devices each gets.

stage     0: 1 x 3    1: 2 x 4    2: 1 x 2    3: 1 x 1    4: 1 x 2      hosts of 4 devices

host 0    0  0  0  3
host 1    1  1  1  1
host 2    1  1  1  1
host 3    2  2  4  4
"""

from collections.abc import Mapping, Sequence
from math import inf
from typing import NamedTuple

_MOST_TRIES = 10_000
"""Dead ends after which packing counts as impossible."""


class Hosts(NamedTuple):
    """Hosts of one kind: how many, with how many devices, and bytes a stage may use of each."""

    num_hosts: int
    num_devices: int
    memory_bytes: float = inf


class Submesh(NamedTuple):
    """The devices of a stage: so many of one host of a kind, or all of several."""

    kind: int
    num_hosts: int
    num_devices: int


class Stage(NamedTuple):
    """Layers [start, end) on a mesh."""

    start: int
    end: int
    submesh: Submesh


def pack(stages: Sequence[Stage], hosts: Sequence[Hosts]) -> tuple[tuple[int, ...], ...] | None:
    """Return the numbers of the devices of each stage; None where it is impossible.

    Devices are numbered host by host, kind by kind.  A part of a host is in one host; larger parts
    are placed first, and beside the nearest stages that leave room.  Hosts are taken in the order
    of their first stages.  Every packing is tried, unless that takes too long.
    """
    found: list[tuple[int, ...]] = [()] * len(stages)
    first = 0
    for kind, (num_hosts, most, _) in enumerate(hosts):
        own = {n: mesh for n, (_, _, mesh) in enumerate(stages) if mesh.kind == kind}
        whole = [n for n, mesh in own.items() if mesh.num_devices == most]
        parts = {n: mesh.num_devices for n, mesh in own.items() if mesh.num_devices < most}
        left = num_hosts - sum(own[n].num_hosts for n in whole)
        groups = _grouped(parts, left, most)
        if groups is None:
            return None
        host = first
        for group in sorted([*groups, *([n] for n in whole)], key=min):
            device = host
            for n in sorted(group):
                size = own[n].num_hosts * own[n].num_devices
                found[n] = tuple(range(device, device + size))
                device += size
            host += own[group[0]].num_hosts * most
        first += num_hosts * most
    return tuple(found)


def _grouped(parts: Mapping[int, int], num_hosts: int, most: int) -> list[list[int]] | None:
    """Return the stages of each host in use, from the devices that each stage needs."""
    if num_hosts < 0 or sum(parts.values()) > num_hosts * most:
        return None
    in_order = sorted(parts, key=lambda n: (-parts[n], n))
    groups: list[list[int]] = [[] for _ in range(num_hosts)]
    free = [most] * num_hosts
    dead: set[tuple[int, ...]] = set()

    def place(at: int) -> bool:
        """Place the stages from `at` on, or leave all as it was."""
        if at == len(in_order):
            return True
        key = (at, *sorted(free))
        if key in dead or len(dead) > _MOST_TRIES:
            return False
        stage = in_order[at]
        for host in _hosts_for(stage, parts[stage], groups, free):
            groups[host].append(stage)
            free[host] -= parts[stage]
            if place(at + 1):
                return True
            groups[host].pop()
            free[host] += parts[stage]
        dead.add(key)
        return False

    return [group for group in groups if group] if place(0) else None


def _hosts_for(
    stage: int, size: int, groups: Sequence[Sequence[int]], free: Sequence[int]
) -> list[int]:
    """Return hosts with unlike room: those with the nearest stages first, then an unused one."""
    used = sum(map(bool, groups))
    near = sorted(range(used), key=lambda host: min(abs(stage - n) for n in groups[host]))
    by_room: dict[int, int] = {}
    for host in (*near, used)[: len(groups)]:
        if free[host] >= size:
            by_room.setdefault(free[host], host)
    return list(by_room.values())
