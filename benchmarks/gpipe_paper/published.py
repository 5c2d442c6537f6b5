"""What GPipe's paper printed (Huang et al. 2019): tables 1 to 3 of arXiv 1811.06965v5, and section
3.1 of the NeurIPS version.
"""

from dataclasses import dataclass

AMOEBANET, TRANSFORMER = "AmoebaNet-D", "Transformer"

THROUGHPUT_TPU: dict[str, dict[tuple[int, int], float]] = {
    f"{AMOEBANET} (18, 256)": {
        (2, 1): 1.0,
        (4, 1): 1.13,
        (8, 1): 1.38,
        (2, 4): 1.07,
        (4, 4): 1.26,
        (8, 4): 1.72,
        (2, 32): 1.21,
        (4, 32): 1.84,
        (8, 32): 3.48,
    },
    f"{TRANSFORMER}-48": {
        (2, 1): 1.0,
        (4, 1): 1.07,
        (8, 1): 1.3,
        (2, 4): 1.7,
        (4, 4): 3.2,
        (8, 4): 4.8,
        (2, 32): 1.8,
        (4, 32): 3.4,
        (8, 32): 6.3,
    },
}
"""Table 2: by model and (K, M), over K = 2, M = 1."""

THROUGHPUT_GPU: dict[str, dict[tuple[int, int], float]] = {
    f"{AMOEBANET} (18, 128)": {(2, 32): 1.0, (4, 32): 1.7, (8, 32): 2.7},
    f"{TRANSFORMER}-24": {(2, 32): 1.0, (4, 32): 1.8, (8, 32): 3.3},
}
"""Table 3: P100s without fast links, over K = 2."""

BREAKDOWN = {
    "computation": 0.656,
    "recompute": 0.225,
    "bubble": 0.041,
    "load imbalance": 0.032,
    "accumulation, update": 0.017,
    "set-up": 0.029,
}
"""Section 3.1 of the NeurIPS version, with two partitions: shares of the step.

The text and the chart do not say of which model they are, nor with how many micro-batches.  The
slice for accumulation and update has no label: it is what is left.
"""


@dataclass(frozen=True, slots=True)
class Largest:
    """A column of table 1: the largest model on so many devices.

    `parameters` and `decimals` are as printed, 282.2 in millions say.  Bytes are those of all
    devices together, as printed in `unit_bytes`.
    """

    name: str
    num_devices: int
    size: tuple[int, ...]
    parameters: float
    million: int
    decimals: int
    parameter_memory: float
    activation_memory: float
    unit_bytes: int
    is_pipeline: bool = True

    @property
    def num_parameters(self) -> float:
        """As printed."""
        return self.parameters * self.million


_M, _B = 10**6, 10**9
_GB, _GIB = 10**9, 2**30

LARGEST_AMOEBANET = (
    Largest("Naive-1", 1, (18, 208), 82, _M, 0, 1.05, 6.26, _GB, is_pipeline=False),
    Largest("Pipeline-1", 1, (18, 416), 318, _M, 0, 3.8, 3.46, _GB),
    Largest("Pipeline-2", 2, (18, 544), 542, _M, 0, 6.45, 8.11, _GB),
    Largest("Pipeline-4", 4, (36, 544), 1.05, _B, 2, 12.53, 15.21, _GB),
    Largest("Pipeline-8", 8, (72, 512), 1.8, _B, 1, 24.62, 26.24, _GB),
)
"""Table 1, left: (L, D), mini-batch 128, 224 x 224."""

LARGEST_TRANSFORMER = (
    # printed the other way round: 282.2M parameters of 12 bytes are 3.15 GiB
    Largest("Naive-1", 1, (3,), 282.2, _M, 1, 3.15, 11.7, _GIB, is_pipeline=False),
    Largest("Pipeline-1", 1, (13,), 785.8, _M, 1, 8.8, 6.4, _GIB),
    Largest("Pipeline-8", 8, (103,), 5.3, _B, 1, 59.5, 50.9, _GIB),
    Largest("Pipeline-32", 32, (415,), 21.0, _B, 1, 235.1, 199.9, _GIB),
    Largest("Pipeline-128", 128, (1663,), 83.9, _B, 1, 937.9, 796.1, _GIB),
)
"""Table 1, right: L, mini-batch 32, 1024 words."""
