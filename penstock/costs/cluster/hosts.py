"""Hosts and links of a cluster, as kinds."""

from dataclasses import dataclass
from enum import StrEnum


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
