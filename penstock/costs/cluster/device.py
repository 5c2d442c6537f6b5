"""A kind of device, as a cost model needs it: peaks, memory, and what is reached of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A kind of accelerator, or a core of a host.

    `flops_per_s` is the peak by dtype ("float32", "bfloat16", ...; a matrix product of n multiply
    and adds is 2 n FLOPs), `bytes_per_s` what a copy in its memory reaches, read and written bytes
    added up: measured, not the data sheet's.  `efficiency` is the share of the peak (products and
    convolutions) or of the copy (all else) that a class of operators reaches, by the names in
    `penstock.costs.records`; "conv3x3.weight" for one part of a backward and
    "gemm.bfloat16" for one dtype count before "gemm".  What is not named has the usual value.
    A kernel takes at least `floor_s`, and `gap_s` lie between two; a host needs `issue_s` to issue
    one operator.  `tile` are rows and columns of the result that one of its `units` computes at
    once: a product that fills them badly takes as long as one that fills them.
    """

    name: str
    flops_per_s: Mapping[str, float]
    bytes_per_s: float
    memory_bytes: int
    torch_type: str = "cuda"
    efficiency: Mapping[str, float] = field(default_factory=dict)
    floor_s: float = 0.0
    gap_s: float = 0.0
    issue_s: float = 0.0
    tile: tuple[int, int] = (1, 1)
    units: int = 1
    elementwise_fusion: float = 1.0
    """Share of elementwise bytes that are left where a compiler fuses operators."""
    host_bytes_per_s: float | None = None
    """Rate of copies to its host's memory, or of a core to a file; None: nothing moves there."""
    source: str = ""

    def __post_init__(self) -> None:
        """Refuse figures that no device has.

        Raises:
            ConfigError: names the field.
        """
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
