"""A kind of device in the cost model: peaks, memory and efficiencies."""

from collections.abc import Mapping
from dataclasses import dataclass, field

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
