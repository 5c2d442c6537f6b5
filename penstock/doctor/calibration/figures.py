"""Work that is timed on a device, and the measured figures: medians of repeats and quartiles.

The work is a copy, a matrix product, a mixture, or the issuing of operators; by one thread, or by
several that work at once.  Figures are written as a table, a comment and JSON.
"""

import json
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn import functional

from penstock.plain_values import to_json
from penstock.trace.units import columns, percent_text, rate_text, time_text

if TYPE_CHECKING:
    from .calibrate import Calibration
    from .card import Compared

Run = Callable[[], object]
"""One repeat of some work."""
CHAIN = 64
"""Operators in `issue_work`."""
ROUNDS = 3
"""Measurements of each number of threads."""
LEAST_TIMES = 5
"""Repeats of a measurement, at least."""
_SAMPLE_S = 2e-4
"""Seconds of one sample; shorter work is repeated within it."""


def rounded(value: float) -> float:
    """Return a number with four significant digits: a measurement has no more."""
    return float(f"{value:.4g}")


class Spread(NamedTuple):
    """A median with its quartiles."""

    middle: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Return the median and quartiles of measured values."""
        if len(values) < 2:
            return cls(values[0], values[0], values[0])
        low, _, high = quantiles(values, n=4, method="inclusive")
        return cls(median(values), low, high)

    @property
    def ratio(self) -> float:
        """The upper quartile over the lower one."""
        if self.high <= self.low:
            return 1.0
        return self.high / self.low if self.low > 0 else math.inf

    def per(self, amount: float) -> "Spread":
        """Return `amount` per second, from seconds."""
        return Spread(amount / self.middle, amount / self.high, amount / self.low)

    def times(self, factor: float) -> "Spread":
        """Return the spread times a factor."""
        return Spread(self.middle * factor, self.low * factor, self.high * factor)


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured figure; `unit` is of `spread`, such as "s" or "B/s"."""

    name: str
    unit: str
    spread: Spread


def seconds_of(run: Run, budget_s: float, wait: Callable[[], None] = lambda: None) -> Spread:
    """Time `run` for `budget_s`, at least `LEAST_TIMES`; `wait` waits for its end."""
    run()  # warm up
    wait()
    start_s = time.perf_counter()
    run()
    wait()
    at_once = max(1, int(_SAMPLE_S / max(time.perf_counter() - start_s, 1e-9)))
    times_s: list[float] = []
    began_s = time.perf_counter()
    while len(times_s) < LEAST_TIMES or time.perf_counter() - began_s < budget_s:
        start_s = time.perf_counter()
        for _ in range(at_once):
            run()
        wait()
        times_s.append((time.perf_counter() - start_s) / at_once)
    return Spread.of(times_s)


def value_text(unit: str, value: float) -> str:
    """Return a figure's value as text: a time, a rate or a share."""
    if unit == "s":
        return time_text(value)
    if unit.endswith("/s"):
        return rate_text(value, unit.removesuffix("/s"))
    return percent_text(value)


def calibration_lines(figures: Sequence[Figure]) -> Iterator[str]:
    """Yield the lines of a table: medians with their quartiles."""
    rows = [("measured", "median", "quartiles")]
    for figure in figures:
        middle, low, high = (value_text(figure.unit, value) for value in figure.spread)
        rows.append((figure.name, middle, f"{low} to {high}"))
    yield from columns(rows, num_left=1)


def comment_of(calibration: "Calibration") -> str:
    """Return the comment of a cluster file: the figures with their spread."""
    return "\n".join(
        (
            "Written by penstock doctor --calibrate; edit what you know better.  Measured:",
            "",
            *calibration_lines(calibration.figures),
            *([calibration.warning] if calibration.warning else ()),
        )
    )


def as_line(calibration: "Calibration", cards: Mapping[str, Sequence["Compared"]]) -> str:
    """Return one line of JSON: the cluster, its figures, and those of cards beside presets."""
    names = ("name", "unit", "middle", "low", "high")
    lines = ((f.name, f.unit, *f.spread) for f in calibration.figures)
    figures = [dict(zip(names, line, strict=True)) for line in lines]
    cluster = json.loads(to_json(calibration.cluster))
    presets = {
        preset: [
            {"name": own.figure.name, "unit": own.figure.unit, "preset": own.preset}
            | {"measured": own.figure.spread.middle, "off": own.off, "key": own.key}
            | {"value": own.value}
            for own in found
        ]
        for preset, found in cards.items()
    }
    told = {"cluster": cluster, "figures": figures, "presets": presets}
    return json.dumps({**told, "warning": calibration.warning})


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of the work: bytes of a copy, rows of a product, images of a convolution."""

    copy_bytes: int = 1 << 27
    gemm: int = 1024
    images: tuple[int, int, int, int] = (16, 64, 28, 28)


USUAL = Sizes()
"""Sizes for a core."""
LARGE = Sizes(copy_bytes=1 << 30, gemm=8192)
"""Sizes that fill a GPU and exceed its caches."""
TINY = Sizes(copy_bytes=1 << 16, gemm=32, images=(2, 4, 8, 8))
"""Sizes for tests: fast, with meaningless figures."""


def copy_work(device: torch.device, num_bytes: int) -> Run:
    """Return a copy within the memory of a device that reads and writes `num_bytes` in all."""
    source = torch.ones(num_bytes // 8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def gemm_work(device: torch.device, size: int, dtype: torch.dtype = torch.float32) -> Run:
    """Return a product of two square matrices: 2 size ** 3 FLOPs."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    into = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=into)


def issue_work(device: torch.device) -> Run:
    """Return the forward and backward of `CHAIN` operators too small to compute anything."""
    x = torch.ones(1, device=device, requires_grad=True)

    def run() -> object:
        y = x
        for _ in range(CHAIN):
            y = torch.neg(y)
        return torch.autograd.grad(y, x)

    return run


def mixed_work(sizes: Sizes) -> Run:
    """Return a product, a convolution and a copy on a core, one after the other."""
    cpu = torch.device("cpu")
    product, copy = gemm_work(cpu, sizes.gemm // 2), copy_work(cpu, sizes.copy_bytes // 4)
    images, channels = torch.randn(sizes.images), sizes.images[1]
    weight = torch.randn(channels, channels, 3, 3)
    return lambda: (product(), functional.conv2d(images, weight, padding=1), copy())


def shares_alone(make: Callable[[], Run], most_threads: int, budget_s: float) -> dict[int, Spread]:
    """Return the speed of each of 1, 2, 4, ..., `most_threads` threads, a share of one's."""
    counts = [2**n for n in range((most_threads - 1).bit_length())] + [most_threads]
    window_s = budget_s / (ROUNDS * len(counts))
    rounds: dict[int, list[float]] = {n: [] for n in counts}
    for _ in range(ROUNDS):
        (alone,) = rates(make, 1, window_s)
        for n in counts:
            speeds = rates(make, n, window_s) if n > 1 else [alone]
            rounds[n].append(min(1.0, sum(speeds) / n / alone))
    return {n: Spread.of(shares) for n, shares in rounds.items()}


def share_at(known: Mapping[int, Spread], n: int) -> float:
    """Return the median for n threads, interpolated between its neighbours."""
    below, above = max(k for k in known if k <= n), min(k for k in known if k >= n)
    weight = (n - below) / max(1, above - below)
    return (1 - weight) * known[below].middle + weight * known[above].middle


def rates(make: Callable[[], Run], num_threads: int, window_s: float) -> list[float]:
    """Return the repeats per second of each of several threads that work at once."""
    # 1. All threads wait for each other, and the last one notes the time.
    began_s: list[float] = []
    barrier = threading.Barrier(num_threads, lambda: began_s.append(time.perf_counter()))
    speeds: list[float] = []
    failures: list[Exception] = []

    def serve() -> None:
        try:
            torch.set_num_threads(1)
            run = make()
            run()
            barrier.wait()
            count, passed_s = 0, 0.0
            while count == 0 or passed_s < window_s:
                run()
                count, passed_s = count + 1, time.perf_counter() - began_s[0]
            speeds.append(count / passed_s)
        except Exception as failure:
            failures.append(failure)
            barrier.abort()

    # 2. Run them, and raise the error that broke the barrier, if there is one.
    threads = [threading.Thread(target=serve, daemon=True) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        broken = threading.BrokenBarrierError
        raise next((f for f in failures if not isinstance(f, broken)), failures[0])
    return speeds
