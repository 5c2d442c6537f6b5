"""What was measured of a link, and the `Link` that it makes."""

from collections.abc import Iterator
from typing import NamedTuple

from penstock.costs.cluster import Link

from .figures import Figure, Spread
from .rounding import rounded

_HALF_WAY = 0.75
"""Of what one direction reaches alone; a duplex link has all of it both ways, another one half."""


class MeasuredLink(NamedTuple):
    """Seconds that messages take, of a few bytes and of `num_bytes`.

    `small_s` and `large_s` are from the begin of a send to the end of a receive that waited;
    `crossing_s` is as `large_s` while another one comes the other way.  `overhead_s` is for how
    long either end is busy with a small message, `busy_s` with a large one.
    """

    num_bytes: int
    small_s: Spread
    large_s: Spread
    crossing_s: Spread
    overhead_s: Spread
    busy_s: Spread

    @property
    def travel_s(self) -> float:
        """What the bytes themselves take; at least what the measurement can tell from nothing."""
        noise_s = (self.large_s.high - self.large_s.low) / 2
        return max(self.large_s.middle - self.small_s.middle, noise_s, 1e-9)

    @property
    def copying_s(self) -> float:
        """For how long either end is busy with the bytes themselves."""
        return max(0.0, self.busy_s.middle - self.overhead_s.middle)

    def link(self, source: str) -> Link:
        """Return what a simulation needs of it."""
        latency_s = max(0.0, self.small_s.middle - 2 * self.overhead_s.middle)
        copies = self.copying_s > self.travel_s / 10
        return Link(
            bytes_per_s=rounded(self.num_bytes / self.travel_s),
            latency_s=rounded(latency_s),
            duplex=self.large_s.middle / self.crossing_s.middle > _HALF_WAY,
            overhead_s=rounded(self.overhead_s.middle),
            copy_bytes_per_s=rounded(self.num_bytes / self.copying_s) if copies else None,
            source=source,
        )

    def figures(self, name: str) -> Iterator[Figure]:
        """Yield what was measured, as lines of a table."""
        size = f"{self.num_bytes >> 10} KiB"
        yield Figure(f"{name}: a small message", "s", self.small_s)
        yield Figure(f"{name}: {size}", "s", self.large_s)
        yield Figure(f"{name}: {size}, both ways at once", "s", self.crossing_s)
        yield Figure(f"{name}: either end busy, small", "s", self.overhead_s)
        yield Figure(f"{name}: either end busy, {size}", "s", self.busy_s)
