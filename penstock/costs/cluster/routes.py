"""Routes between devices of a cluster: links, and the lanes that transfers share."""

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from .hosts import Host, Link, NcclLink


class Place(NamedTuple):
    """A device of a cluster: its host, its number in the host, and its kind."""

    host: int
    host_name: str
    number: int
    kind: str


class Lane(NamedTuple):
    """One direction of a resource that transfers share."""

    what: str
    """"port", "uplink" or "network"."""
    where: tuple[int, ...]
    """Numbers of the host, and of the device, group or card in it."""
    direction: str
    """"out" or "in"; "both" if the link is not duplex."""


class Route(NamedTuple):
    """The path of a value from one device to another, over all lanes at once.

    `overhead_s`, `blocks`, `copy_bytes_per_s` and `collective_s` are the slowest link's.
    """

    lanes: tuple[Lane, ...]
    latency_s: float
    """Sum over kinds of lanes, each with the longer latency of both ends."""
    bytes_per_s: float
    """Bandwidth of the slowest link."""
    overhead_s: float = 0.0
    blocks: bool = False
    lane_links: tuple[Link, ...] = ()
    """The link of each lane."""
    copy_bytes_per_s: float = math.inf
    collective_s: float = 0.0
    nccl: NcclLink | None = None
    """The kind of the outermost link."""

    def busy_s(self, num_bytes: float) -> float:
        """Return the seconds of a message in which its sender, or receiver, computes nothing."""
        return self.overhead_s + num_bytes / self.copy_bytes_per_s


AT_ONCE = Route((), 0.0, math.inf)
"""The route from a device to itself: no lanes, and no time."""


class _End(NamedTuple):
    """A link at one end of a route, and its place."""

    what: str
    where: tuple[int, int]
    link: Link

    def lane(self, direction: str) -> Lane:
        return Lane(self.what, self.where, direction if self.link.duplex else "both")


def route_between(
    source: tuple[Place, Host], target: tuple[Place, Host], links: Mapping[str, Link]
) -> Route:
    """Return the route from one device to another."""
    if source[0] == target[0]:
        return AT_ONCE
    pairs = list(_segments(source, target, links))
    passed = [(a, "out") for a, _ in pairs] + [(b, "in") for _, b in reversed(pairs)]
    lanes = {end.lane(direction): end.link for end, direction in passed}
    slowest = min((end.link for pair in pairs for end in pair), key=lambda x: x.bytes_per_s)
    copying = slowest.copy_bytes_per_s
    return Route(
        lanes=tuple(lanes),
        latency_s=sum(max(end.link.latency_s for end in pair) for pair in pairs),
        bytes_per_s=slowest.bytes_per_s,
        overhead_s=slowest.overhead_s,
        blocks=slowest.blocks,
        lane_links=tuple(lanes.values()),
        copy_bytes_per_s=math.inf if copying is None else copying,
        collective_s=slowest.collective_s,
        nccl=pairs[-1][0].link.nccl,
    )


def _segments(
    source: tuple[Place, Host], target: tuple[Place, Host], links: Mapping[str, Link]
) -> Iterator[tuple[_End, _End]]:
    """Yield the links at both ends, from the devices outwards."""
    (a, at), (b, to) = source, target
    if at.port is not None and to.port is not None:
        yield (
            _End("port", (a.host, a.number), links[at.port]),
            _End("port", (b.host, b.number), links[to.port]),
        )
    if a.host != b.host:
        assert at.network is not None and to.network is not None, "checked by Cluster"
        yield (
            _End("network", (a.host, at.card_of(a.number)), links[at.network]),
            _End("network", (b.host, to.card_of(b.number)), links[to.network]),
        )
        return
    out_of, into = at.group_of(a.number), to.group_of(b.number)
    if at.uplink is not None and out_of is not None and into is not None and out_of != into:
        uplink = links[at.uplink]
        yield _End("uplink", (a.host, out_of), uplink), _End("uplink", (b.host, into), uplink)
