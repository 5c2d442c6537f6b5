"""Work that is timed on a device: a copy, a matrix product, a mixture, issuing of operators.

Also measures the speed of each of several threads that work at once.
"""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch.nn import functional

from .figures import Spread

Run = Callable[[], object]
"""One repeat of some work."""
CHAIN = 64
"""Operators in `issue_work`."""
ROUNDS = 3
"""Measurements of each number of threads."""


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
