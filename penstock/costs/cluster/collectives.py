"""Seconds of collectives as NCCL runs them, for all groups of devices that run one at once.

A form of a collective has a latency and a load on each lane; its seconds for b bytes are

    latency + greatest sum of loads on a lane of all groups / bandwidth of the lane

and the fastest form counts.  Bandwidth grows with b: on a link with `half_rate_bytes` h, the
latency is at least the time of the load of h bytes, so b = h has half of the bandwidth, beside
`collective_s`.  LL, the protocol for few bytes, keeps its latency.

n devices of a group are on k hosts.  Loads are in units of b:

    form      kinds                  passes inside hosts      crosses the border of a host
    ring      all but all-to-all     m (n - 1) / n            m (n - 1) / n
    tree      all-reduce, k > 1      2, as chains             1 for k = 2, else 2
    switch    all-reduce, k = 1      1 + 1 / n                -
    pairs     all-to-all             1 / n for each pair      1 / n for each pair

m is 2 for an all-reduce, a reduce-scatter and an all-gather, and 1 for each of these alone.
Rings and trees have c channels with b / c bytes each.  c is the number of network cards that
the group has on its poorest host.  A channel enters host after host at another card:

    channel 0    0 1 2 3 │ 4 5 6 7 │ 0        the device before │ sends to the next host
    channel 1    1 2 3 0 │ 5 6 7 4 │ 1

b counts the bytes of a device before an all-reduce, a reduce-scatter or an all-to-all, and after
an all-gather.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain, pairwise
from typing import NamedTuple

from penstock.errors import ConfigError

from .cluster import Cluster
from .hosts import Lane, NcclLink


class Collective(StrEnum):
    """A kind of collective."""

    ALL_REDUCE = "all-reduce"
    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_TO_ALL = "all-to-all"


class _Protocol(NamedTuple):
    """A protocol by which NCCL moves the bytes of a form: it waits for flags, or whole chunks."""

    base_s: float
    nvlink_s: float
    """Seconds of a hop; likewise below."""
    pcie_s: float
    network_s: float
    share: float
    """Share of the bandwidth that is left for data."""
    ramps: bool = True
    """False if few bytes already have the bandwidth of many."""
    plateau: float = 1.0
    """Factor on the latency of an all-reduce's ring over several hosts."""

    def hop_s(self, hop: "_Hop") -> float:
        """Return the seconds of a hop: NCCL's, or those of the link if it has no kind."""
        return hop.latency_s if hop.nccl is None else float(getattr(self, f"{hop.nccl}_s"))


# LL, LL128 and Simple, as in NCCL's src/graph/tuning.cc (2.30)
_RING = (
    _Protocol(6.6e-6, 0.6e-6, 1.0e-6, 2.7e-6, 1 / 2, ramps=False),
    _Protocol(14.0e-6, 1.9e-6, 2.5e-6, 4.0e-6, 120 / 128),
    _Protocol(8.4e-6, 3.4e-6, 5.7e-6, 14.0e-6, 1.0, plateau=1.4),
)
_TREE = (
    _Protocol(6.8e-6, 0.6e-6, 1.0e-6, 5.0e-6, 0.92 / 3.8, ramps=False),
    _Protocol(14.0e-6, 1.25e-6, 1.9e-6, 8.5e-6, 0.92 * 120 / 128),
    _Protocol(8.4e-6, 4.0e-6, 4.0e-6, 14.0e-6, 0.92),
)
_PLAIN = (_Protocol(0.0, 0.0, 0.0, 0.0, 1.0),)
"""Of links that NCCL does not know: each hop has the latency of the link."""
_SWITCH_S = 25e-6
"""Latency of sums inside a switch, from the same table."""
_LEAST_IN_SWITCH = 5
"""Fewest devices whose sums NCCL leaves to a switch: 5 on H200 (ml-engineering, network)."""


class Form(NamedTuple):
    """A form of a collective."""

    latency_s: float
    """Seconds without a byte."""
    s_per_byte: float
    """Seconds that each byte adds."""


class _Hop(NamedTuple):
    """A kind of hop between two devices."""

    crosses: bool
    """True from host to host."""
    nccl: NcclLink | None
    latency_s: float


_Message = tuple[int, int, float]
"""Sender, receiver, and bytes in units of b."""


def collective_s(
    cluster: Cluster, groups: Sequence[Sequence[int]], kind: Collective, num_bytes: float
) -> float:
    """Return the seconds of a collective that all groups, of equal length, run at once.

    Raises:
        ConfigError: a group is empty or repeats a device, or the cluster lacks a device.
    """
    return fastest_s(forms_of(cluster, groups, kind), num_bytes)


def fastest_s(forms: Sequence[Form], num_bytes: float) -> float:
    """Return the seconds of the fastest form; 0 if there is none."""
    return min((form.latency_s + num_bytes * form.s_per_byte for form in forms), default=0.0)


def forms_of(
    cluster: Cluster, groups: Sequence[Sequence[int]], kind: Collective
) -> tuple[Form, ...]:
    """Return the forms that a collective of all groups at once may have; none for one device.

    Raises:
        ConfigError: a group is empty or repeats a device, or the cluster lacks a device.
    """
    placed = [_Group.of(cluster, group) for group in groups]
    if placed[0].size == 1:
        return ()
    return tuple(_forms(cluster, placed, kind))


@dataclass(frozen=True, slots=True)
class _Group:
    """A group of devices by its channels."""

    channels: tuple[tuple[tuple[int, ...], ...], ...]
    """Devices, [channel, host, place on the channel's way through the host]."""

    @classmethod
    def of(cls, cluster: Cluster, group: Sequence[int]) -> "_Group":
        if not group or len(set(group)) != len(group):
            raise ConfigError(
                f"the group {list(group)} is empty or repeats a device; name each once"
            )
        # 1. Devices of each host, and the first one of each card.
        hosts: dict[int, dict[int, list[int]]] = {}
        for place in sorted(group):
            card = cluster.host_of(place).card_of(cluster.places[place].number)
            hosts.setdefault(cluster.places[place].host, {}).setdefault(card, []).append(place)
        # 2. Each channel enters a host at another card.
        num_channels = min(map(len, hosts.values())) if len(hosts) > 1 else 1
        ways = [[*cards.values()] for cards in hosts.values()]
        return cls(
            tuple(
                tuple(tuple(chain.from_iterable(way[n:] + way[:n])) for way in ways)
                for n in range(num_channels)
            )
        )

    @property
    def size(self) -> int:
        return sum(map(len, self.channels[0]))

    @property
    def num_hosts(self) -> int:
        return len(self.channels[0])

    def ring(self, part: float) -> Iterator[_Message]:
        """Yield what neighbours on the rings of all channels send."""
        for channel in self.channels:
            for a, b in _around([*chain.from_iterable(channel)]):
                yield a, b, part / len(self.channels)

    def tree(self) -> Iterator[_Message]:
        """Yield what a tree sends: up and down the chain of each host, and between the heads.

        Two trees share the bytes: each host is inside one, with a parent and two children, and a
        leaf of the other, so it sends and receives them twice; of two hosts, once.
        """
        share = 1 / len(self.channels)
        across = share if self.num_hosts == 2 else 2 * share
        for channel in self.channels:
            for on_host in channel:
                for a, b in pairwise(on_host):
                    yield a, b, share
                    yield b, a, share
            for a, b in _around([on_host[0] for on_host in channel]):
                yield a, b, across

    def pairs(self) -> Iterator[_Message]:
        """Yield what each device sends to each other one."""
        members = [*chain.from_iterable(self.channels[0])]
        return ((a, b, 1 / self.size) for a in members for b in members if a != b)


def _forms(cluster: Cluster, groups: Sequence[_Group], kind: Collective) -> Iterator[Form]:
    """Yield the forms of a collective over at least two devices."""
    first, passes = groups[0], 2 if kind is Collective.ALL_REDUCE else 1
    n, k = first.size, max(group.num_hosts for group in groups)
    # 1. Rings, and all pairs at once.
    part = passes * (n - 1) / n
    is_ring = kind is not Collective.ALL_TO_ALL
    moved = _Moved.of(cluster, n, [x.ring(part) if is_ring else x.pairs() for x in groups])
    for protocol in moved.protocols(_RING):
        inside_s, across_s = moved.hops_s(protocol)
        hops_s = passes * ((n - k) * inside_s + (k - 1) * across_s)
        factor = protocol.plateau if k > 1 and passes == 2 else 1.0
        yield moved.form(protocol, factor * (protocol.base_s + hops_s), part)
    if kind is not Collective.ALL_REDUCE:
        return
    # 2. Trees of hosts.
    if k > 1 and moved.protocols(_TREE) is _TREE:
        moved = _Moved.of(cluster, n, [group.tree() for group in groups])
        length = max(len(host) for group in groups for host in group.channels[0]) - 1
        for protocol in _TREE:
            inside_s, across_s = moved.hops_s(protocol)
            hops_s = 2 * (length * inside_s + math.log2(k) * across_s)
            yield moved.form(protocol, protocol.base_s + hops_s, part)
    # 3. Sums inside a switch.
    for rate, half_bytes in _summing(cluster, groups):
        s_per_byte = (1 + 1 / n) / rate
        yield Form(moved.begun_s + max(_SWITCH_S, half_bytes * s_per_byte), s_per_byte)


def _summing(cluster: Cluster, groups: Sequence[_Group]) -> Sequence[tuple[float, float]]:
    """Return the rate of the slowest switch's sums with the bytes at which they reach half of it.

    There is none if some group's sums are not made in a switch.
    """
    found: list[tuple[float, float]] = []
    for group in groups:
        port = cluster.host_of(group.channels[0][0][0]).port
        rate = None if port is None else cluster.links[port].sum_bytes_per_s
        if port is None or rate is None or group.num_hosts > 1 or group.size < _LEAST_IN_SWITCH:
            return []
        found.append((rate, cluster.links[port].half_rate_bytes))
    return [min(found)]


@dataclass(frozen=True, slots=True)
class _Moved:
    """The bytes that all groups of `size` devices send at once."""

    hops: frozenset[_Hop]
    s_per_byte: float
    """Seconds of the fullest lane for each byte of b."""
    begun_s: float
    """Seconds of a collective beside its messages."""
    ramp_s: float
    """Seconds in which the slowest link to reach half its rate moves the bytes that it takes."""

    @classmethod
    def of(cls, cluster: Cluster, size: int, messages: Iterable[Iterable[_Message]]) -> "_Moved":
        places, loads, rates = cluster.places, defaultdict[Lane, float](float), dict[Lane, float]()
        hops, begun_s, ramp_s = set[_Hop](), 0.0, 0.0
        for of_group in messages:
            for a, b, part in of_group:
                route = cluster.route(a, b)
                for lane, link in zip(route.lanes, route.lane_links, strict=True):
                    loads[lane] += part
                    rates[lane] = link.ring_bytes_per_s(size)
                    ramp_s = max(ramp_s, link.half_rate_bytes / rates[lane])
                latency_s = route.latency_s + 2 * route.overhead_s
                hops.add(_Hop(places[a].host != places[b].host, route.nccl, latency_s))
                begun_s = max(begun_s, route.collective_s)
        s_per_byte = max((load / rates[lane] for lane, load in loads.items()), default=0.0)
        return cls(frozenset(hops), s_per_byte, begun_s, ramp_s)

    def form(self, protocol: _Protocol, latency_s: float, part: float) -> Form:
        """Return the form by a protocol; `part`: what a ring's channel moves for each of b."""
        ramp_s = self.ramp_s * part / protocol.share if protocol.ramps else 0.0
        return Form(self.begun_s + max(latency_s, ramp_s), self.s_per_byte / protocol.share)

    def protocols(self, of_nccl: tuple[_Protocol, ...]) -> tuple[_Protocol, ...]:
        """Return NCCL's protocols if it knows one of the links, else the plain one."""
        return of_nccl if any(hop.nccl for hop in self.hops) else _PLAIN

    def hops_s(self, protocol: _Protocol) -> tuple[float, float]:
        """Return the seconds of the slowest hop inside a host, and of that between hosts."""
        inside_s, across_s = (
            max((protocol.hop_s(hop) for hop in self.hops if hop.crosses is crosses), default=0.0)
            for crosses in (False, True)
        )
        return inside_s, across_s


def _around(members: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield each member of a ring with the next one."""
    return zip(members, [*members[1:], members[0]], strict=True)
