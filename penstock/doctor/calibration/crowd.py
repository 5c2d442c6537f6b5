"""How fast each of several threads works while all do."""

import threading
import time
from collections.abc import Callable, Sequence

import torch

from .figures import Spread
from .work import Run

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
