"""Devices, links and hosts of a cluster, as kinds; and routes between devices, over links and the
lanes that transfers share.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from penstock.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A kind of accelerator, or a core of a host."""

    name: str
    flops_per_s: Mapping[str, float]
    """Peak by dtype ("float32", "bfloat16", ...); one multiply and add is 2 FLOPs."""
    bytes_per_s: float
    """Measured rate of a copy in its memory, read and written bytes added up."""
    memory_bytes: int
    torch_type: str = "cuda"
    efficiency: Mapping[str, float] = field(default_factory=dict)
    """Share of the peak (products) or of the copy (all else) that a class of operators reaches.

    Keys are `PRODUCTS` and `MOVES` of costs/records.py.  "conv3x3.weight" for one part of a
    backward and "gemm.bfloat16" for one dtype count before "gemm".  Others have `USUAL`.
    """
    floor_s: float = 0.0
    """Least seconds of a kernel."""
    gap_s: float = 0.0
    """Seconds between two kernels."""
    issue_s: float = 0.0
    """Seconds in which the host issues one operator."""
    tile: tuple[int, int] = (1, 1)
    """Rows and columns of a product that one unit computes at once; a partial tile costs the same.
    """
    units: int = 1
    """Units that compute tiles at the same time."""
    elementwise_fusion: float = 1.0
    """Share of elementwise bytes that remain after a compiler fuses operators."""
    host_bytes_per_s: float | None = None
    """Rate of copies to host memory, or of a core to a file; None: offload is impossible."""
    source: str = ""

    def __post_init__(self) -> None:
        # 1. Rates, sizes and shares must be above 0, since costs divide by them.
        to_host = self.host_bytes_per_s
        positive: list[tuple[str, float]] = [
            ("bytes_per_s", self.bytes_per_s),
            ("memory_bytes", self.memory_bytes),
            ("units", self.units),
            ("elementwise_fusion", self.elementwise_fusion),
            *([("host_bytes_per_s", to_host)] if to_host is not None else []),
            *((f"tile[{n}]", size) for n, size in enumerate(self.tile)),
            *((f"flops_per_s.{dtype}", peak) for dtype, peak in self.flops_per_s.items()),
            *((f"efficiency.{name}", share) for name, share in self.efficiency.items()),
        ]
        for name, value in positive:
            if value <= 0:
                raise ConfigError(
                    f"{name} of device {self.name!r} is {value}; give a number above 0"
                )
        # 2. Added times may be 0.
        for name in ("floor_s", "gap_s", "issue_s"):
            if getattr(self, name) < 0:
                raise ConfigError(
                    f"{name} of device {self.name!r} is {getattr(self, name)}; nothing takes less "
                    "than 0 seconds"
                )
        if not self.flops_per_s:
            raise ConfigError(
                f"device {self.name!r} has no flops_per_s; give the peak of at least one dtype"
            )

    @property
    def host_issue_s(self) -> float:
        """Seconds in which the host issues an operator while the device runs earlier ones.

        0 for a core, which issues its own operators: `gap_s` has that.
        """
        return 0.0 if self.torch_type == "cpu" else self.issue_s


class NcclLink(StrEnum):
    """A kind of link in NCCL's table of latencies."""

    NVLINK = "nvlink"
    PCIE = "pcie"
    NETWORK = "network"


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A kind of link."""

    bytes_per_s: float
    """Bandwidth in each direction between two devices."""
    collective_bytes_per_s: float | None = None
    """Bandwidth in each direction of the rings of many devices; None for `bytes_per_s`."""
    sum_bytes_per_s: float | None = None
    """Rate at which a switch sums what devices send (NVLink SHARP); None if it does not."""
    half_rate_bytes: float = 0.0
    """Bytes of a collective, on each channel, that have half of its bandwidth after its start."""
    nccl: NcclLink | None = None
    """The row of NCCL's latencies that collectives have; None for `latency_s` at each hop."""
    latency_s: float = 0.0
    """Seconds until the first byte arrives."""
    duplex: bool = True
    overhead_s: float = 0.0
    """Seconds of a message in which the sender computes nothing; the receiver likewise."""
    blocks: bool = False
    """True if the sender computes nothing until its message has arrived."""
    copy_bytes_per_s: float | None = None
    """Rate at which sender and receiver copy the bytes themselves; None if others move them."""
    collective_s: float = 0.0
    """Seconds of a collective beside its messages: to begin everywhere, and to wake all ranks."""
    source: str = ""

    def ring_bytes_per_s(self, size: int) -> float:
        """Return the bandwidth of rings over `size` devices, on the links that these have."""
        rate = self.collective_bytes_per_s
        return self.bytes_per_s if rate is None else min(rate, (size - 1) * self.bytes_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """`count` equal hosts."""

    name: str
    devices: tuple[str, ...]
    """The kind of each device."""
    count: int = 1
    port: str | None = None
    """The link between devices of a host."""
    processes: str | None = None
    """The link that replaces `port` between separate processes (`Cluster.between_processes`)."""
    groups: tuple[tuple[int, ...], ...] = ()
    """Numbers of the devices behind each switch or socket."""
    uplink: str | None = None
    """The link of each group to the others."""
    network: str | None = None
    """The link to other hosts."""
    cards: int = 1
    """Network cards of a host; its devices share them evenly, in order."""
    memory_bytes: int | None = None
    busy_speed: tuple[float, ...] = ()
    """Speed of a rank while n ranks of the host compute, [n - 1], as a share of a lone rank's.

    More ranks than entries share the speed of the last entry's ranks.
    """

    def group_of(self, number: int) -> int | None:
        """Return the place in `groups` of the one with device `number`; None without groups."""
        return next((n for n, group in enumerate(self.groups) if number in group), None)

    def card_of(self, number: int) -> int:
        """Return the number of the network card that device `number` uses."""
        return number * self.cards // len(self.devices)


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
