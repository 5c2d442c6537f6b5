"""Devices, links and hosts of a cluster, as kinds."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

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
