"""What a device is timed at: copies, matrix products, convolutions, normalisation and pooling; and
how fast each of several threads works while all do.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from penstock.costs.profile import Part

from .figures import Spread

Run = Callable[[], object]
CONVOLUTIONS = {"conv1x1": (1, 1), "conv3x3": (3, 3), "conv": (1, 7)}
"""Classes of operators, and the kernel that is timed for each."""
NORM_PASSES = 8
"""How often a BatchNorm reads or writes a value: 3 times forward and 5 times backward."""
CHAIN = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How large the work is: two sizes of products and of micro-batches, the larger first."""

    copy_bytes: int = 1 << 27
    gemm: tuple[int, int] = (1024, 192)
    batch: tuple[int, int] = (16, 1)
    channels: int = 64
    side: int = 28


USUAL = Sizes()
TINY = Sizes(copy_bytes=1 << 16, gemm=(32, 8), batch=(2, 1), channels=4, side=8)
"""Gives figures that say little, at once."""


class Work(NamedTuple):
    """Something to time: how much it computes, and how many bytes it reads and writes."""

    run: Run
    flops: int = 0
    num_bytes: int = 0


def copy_work(device: torch.device, num_bytes: int) -> Work:
    """Return a copy within the memory of a device."""
    source = torch.ones(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    return Work(lambda: target.copy_(source), num_bytes=2 * num_bytes)


def gemm_work(device: torch.device, size: int, dtype: torch.dtype) -> Work:
    """Return a product of two square matrices."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    into = torch.empty_like(a)
    return Work(lambda: torch.mm(a, b, out=into), flops=2 * size**3)


def convolution_work(
    device: torch.device, kernel: tuple[int, int], batch: int, sizes: Sizes
) -> Iterator[tuple[Part, Work]]:
    """Yield a convolution's forward and the two parts of its backward."""
    channels, side = sizes.channels, sizes.side
    padding = (kernel[0] // 2, kernel[1] // 2)
    x = torch.randn(batch, channels, side, side, device=device, requires_grad=True)
    weight = torch.randn(channels, channels, *kernel, device=device, requires_grad=True)
    y = functional.conv2d(x, weight, padding=padding)
    seed = torch.ones_like(y)
    flops = 2 * y.numel() * channels * kernel[0] * kernel[1]

    def forward() -> Tensor:
        with torch.no_grad():
            return functional.conv2d(x, weight, padding=padding)

    yield Part.FORWARD, Work(forward, flops=flops)
    yield Part.INPUT, Work(lambda: _gradient(y, x, seed), flops=flops)
    yield Part.WEIGHT, Work(lambda: _gradient(y, weight, seed), flops=flops)


def norm_work(device: torch.device, sizes: Sizes) -> Work:
    """Return a BatchNorm's forward and backward."""
    shape = (sizes.batch[0], sizes.channels, sizes.side, sizes.side)
    x = torch.randn(shape, device=device, requires_grad=True)
    norm = torch.nn.BatchNorm2d(sizes.channels, device=device)
    seed = torch.ones_like(x)
    wanted = [x, *norm.parameters()]
    num_bytes = NORM_PASSES * x.numel() * x.element_size()
    return Work(lambda: torch.autograd.grad(norm(x), wanted, seed), num_bytes=num_bytes)


def pool_work(device: torch.device, sizes: Sizes) -> Work:
    """Return the backward of an average pooling over 3 x 3 values."""
    shape = (sizes.batch[0], sizes.channels, sizes.side, sizes.side)
    x = torch.randn(shape, device=device, requires_grad=True)
    y = functional.avg_pool2d(x, 3, stride=1, padding=1)
    seed = torch.ones_like(y)
    num_bytes = 2 * x.numel() * x.element_size()
    return Work(lambda: _gradient(y, x, seed), num_bytes=num_bytes)


def issue_work(device: torch.device) -> Run:
    """Return the forward and backward of a chain of operators too small to compute anything."""
    x = torch.ones(1, device=device, requires_grad=True)

    def run() -> object:
        y = x
        for _ in range(CHAIN):
            y = torch.neg(y)
        return torch.autograd.grad(y, x)

    return run


def mixed_work(device: torch.device, sizes: Sizes) -> Run:
    """Return a product, a convolution and a copy, one after the other."""
    product = gemm_work(device, sizes.gemm[0] // 2, torch.float32)
    convolution = dict(convolution_work(device, (3, 3), sizes.batch[0], sizes))[Part.FORWARD]
    copy = copy_work(device, sizes.copy_bytes // 8)

    def run() -> object:
        return product.run(), convolution.run(), copy.run()

    return run


def _gradient(y: Tensor, of: Tensor, seed: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(y, of, seed, retain_graph=True)


ROUNDS = 3
_MOST_COUNTS = 8
"""Beyond so many numbers of threads, those between are taken to lie on a line."""


def shares_alone(
    make: Callable[[], Run], most_threads: int, budget_s: float
) -> tuple[Spread, ...]:
    """Return, for 1, 2, ... threads at once, how fast each works as a share of one alone."""
    counts = _counts(most_threads)
    window_s = budget_s / (ROUNDS * len(counts))
    rounds: dict[int, list[float]] = {n: [] for n in counts}
    for _ in range(ROUNDS):
        alone = sum(rates(make, 1, window_s))
        for n in counts:
            found = rates(make, n, window_s) if n > 1 else [alone]
            rounds[n].append(min(1.0, sum(found) / n / alone))
    known = {n: Spread.of(shares) for n, shares in rounds.items()}
    return tuple(_between(known, n) for n in range(1, most_threads + 1))


def rates(make: Callable[[], Run], num_threads: int, window_s: float) -> list[float]:
    """Return how often a second each of so many threads does its work, all at once."""
    clock = _Clock()
    barrier = threading.Barrier(num_threads, clock.start)
    found: list[float] = []
    failures: list[BaseException] = []

    def serve() -> None:
        try:
            torch.set_num_threads(1)
            found.append(_rate(make(), barrier, clock, window_s))
        except BaseException as failure:
            failures.append(failure)
            barrier.abort()

    threads = [threading.Thread(target=serve, daemon=True) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    causes = [failure for failure in failures if not isinstance(failure, _BROKEN)]
    if failures:
        raise (causes or failures)[0]
    return found


_BROKEN = threading.BrokenBarrierError


class _Clock:
    """Runs from when the last thread is ready, for all of them."""

    def start(self) -> None:
        self._began_s = time.perf_counter()

    @property
    def passed_s(self) -> float:
        return time.perf_counter() - self._began_s


def _rate(run: Run, barrier: threading.Barrier, clock: _Clock, window_s: float) -> float:
    run()
    barrier.wait()
    count = 0
    while count == 0 or clock.passed_s < window_s:
        run()
        count += 1
    return count / clock.passed_s


def _counts(most: int) -> list[int]:
    """Return which numbers of threads to measure: the first, the last, and some between."""
    if most <= _MOST_COUNTS:
        return list(range(1, most + 1))
    steps = {round(most ** (k / (_MOST_COUNTS - 1))) for k in range(_MOST_COUNTS)}
    return sorted({1, most // 2, most, *steps})


def _between(known: dict[int, Spread], n: int) -> Spread:
    """Return what was measured for n, or what lies on the line between its neighbours."""
    below, above = max(k for k in known if k <= n), min(k for k in known if k >= n)
    if below == above:
        return known[n]
    weight = (n - below) / (above - below)
    pairs: Sequence[tuple[float, float]] = list(zip(known[below], known[above], strict=True))
    return Spread(*(a + weight * (b - a) for a, b in pairs))
