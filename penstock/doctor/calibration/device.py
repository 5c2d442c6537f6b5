"""What one device reaches, from the times of a few operators."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from penstock.costs.device import Device
from penstock.costs.profile import Part
from penstock.interval import Interval, Quantity

from .figures import Figure, rounded, seconds_of
from .work import (
    CHAIN,
    CONVOLUTIONS,
    Sizes,
    Work,
    convolution_work,
    copy_work,
    gemm_work,
    issue_work,
    norm_work,
    pool_work,
)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
NUM_FIGURES = 28
_TOO_SLOW = 10
"""A dtype that is so many times slower than float32 is left out."""


class DeviceFacts(NamedTuple):
    """What is read, not measured."""

    name: str
    memory_bytes: int
    torch_type: str
    source: str


class MeasuredDevice(NamedTuple):
    """A device, and the lines of a table that it was made of."""

    device: Device
    figures: tuple[Figure, ...]


class _Bench:
    """Times work on one device, and keeps what came out."""

    def __init__(self, device: torch.device, budget_s: float) -> None:
        self._device, self._budget_s = device, budget_s
        self.figures: list[Figure] = []

    def per_s(self, name: str, work: Work) -> float:
        """Time some work; return its FLOPs or bytes a second."""
        spread = seconds_of(work.run, self._budget_s, self.wait)
        amount, unit = (work.flops, "FLOP/s") if work.flops else (work.num_bytes, "B/s")
        self.figures.append(Figure(name, unit, spread.per(amount)))
        return amount / spread.middle

    def seconds(self, name: str, run: Callable[[], object], parts: int, *, wait: bool) -> float:
        """Time one of the `parts` of some work."""
        spread = seconds_of(run, self._budget_s, self.wait if wait else lambda: None)
        self.figures.append(Figure(name, "s", spread.times(1 / parts)))
        return spread.middle / parts

    def wait(self) -> None:
        """Wait until the device has done all."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def measure_device(
    device: torch.device, facts: DeviceFacts, sizes: Sizes, budget_s: float
) -> MeasuredDevice:
    """Measure a device alone; what differs with the size of the work becomes an interval."""
    bench = _Bench(device, budget_s / NUM_FIGURES)
    bytes_per_s = bench.per_s("copy", copy_work(device, sizes.copy_bytes))
    peaks, efficiency = _products(bench, device, sizes)
    for name, shares in _convolutions(bench, device, sizes, peaks["float32"]):
        efficiency[name] = _either(shares)
    for name, work in (("norm", norm_work(device, sizes)), ("pool", pool_work(device, sizes))):
        efficiency[name] = rounded(bench.per_s(name, work) / bytes_per_s)
    issue_s = bench.seconds("an operator is issued", issue_work(device), 2 * CHAIN, wait=False)
    ends_s = bench.seconds("an operator on nothing", issue_work(device), 2 * CHAIN, wait=True)
    described = Device(
        name=facts.name,
        flops_per_s={dtype: rounded(peak) for dtype, peak in peaks.items()},
        bytes_per_s=rounded(bytes_per_s),
        memory_bytes=facts.memory_bytes,
        torch_type=facts.torch_type,
        efficiency=efficiency,
        source=facts.source,
        issue_s=rounded(issue_s),
        gap_s=rounded(issue_s) if device.type == "cpu" else 0.0,
        floor_s=_floor_s(device, issue_s, ends_s),
    )
    return MeasuredDevice(described, tuple(bench.figures))


def _floor_s(device: torch.device, issue_s: float, ends_s: float) -> Quantity:
    """Return the least that an operator takes.

    It hides behind the issuing unless it is longer; a core issues what it computes itself.
    """
    return 0.0 if device.type == "cpu" else Interval(0.0, rounded(max(ends_s, issue_s)))


def _products(
    bench: _Bench, device: torch.device, sizes: Sizes
) -> tuple[dict[str, float], dict[str, Quantity]]:
    """Return the peak of each dtype, and the share of it that a small product reaches."""
    peaks: dict[str, float] = {}
    efficiency: dict[str, Quantity] = {}
    for name, dtype in DTYPES.items():
        if peaks and _is_too_slow(device, dtype, sizes, peaks["float32"]):
            continue
        large, small = (
            bench.per_s(f"gemm {size} {name}", gemm_work(device, size, dtype))
            for size in sizes.gemm
        )
        peaks[name] = max(large, small)
        of_dtype = "gemm" if name == "float32" else f"gemm.{name}"
        efficiency[of_dtype] = _either((large / peaks[name], small / peaks[name]))
    return peaks, efficiency


def _is_too_slow(device: torch.device, dtype: torch.dtype, sizes: Sizes, peak: float) -> bool:
    work = gemm_work(device, sizes.gemm[1], dtype)
    bench = _Bench(device, 0.0)
    return bench.per_s("", work) < peak / _TOO_SLOW


def _convolutions(
    bench: _Bench, device: torch.device, sizes: Sizes, peak: float
) -> Iterator[tuple[str, list[float]]]:
    """Yield each part of each kind, with the shares that micro-batches of both sizes reach."""
    for kind, kernel in CONVOLUTIONS.items():
        shares: dict[Part, list[float]] = {part: [] for part in Part}
        for batch in sizes.batch:
            for part, work in convolution_work(device, kernel, batch, sizes):
                shown = f"{kernel[0]}x{kernel[1]} convolution, {part.value}, batch {batch}"
                shares[part].append(bench.per_s(shown, work) / peak)
        for part, found in shares.items():
            yield (kind if part is Part.FORWARD else f"{kind}.{part.value}"), found


def _either(shares: tuple[float, ...] | list[float]) -> Quantity:
    """Return what lies between the shares of large and small work."""
    low, high = rounded(min(shares)), rounded(max(shares))
    return low if low == high else Interval(low, high)
