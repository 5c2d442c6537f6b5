"""What a measurement gave: the median of many, and the quartiles; as a table and a comment."""

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import TYPE_CHECKING, NamedTuple

from penstock.costs.cluster.table import rate_text
from penstock.plain_values import to_json
from penstock.trace.units import columns, percent_text, time_text

if TYPE_CHECKING:
    from .calibrate import Calibration

LEAST_TIMES = 5
_SAMPLE_S = 2e-4
"""Shorter work is timed several times together."""
_DIGITS = 4


def rounded(value: float) -> float:
    """Return a number with four significant digits: no more than a measurement has."""
    return float(f"{value:.{_DIGITS}g}")


class Spread(NamedTuple):
    """A median with its quartiles."""

    middle: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Return that of measured values."""
        if len(values) < 2:
            return cls(values[0], values[0], values[0])
        low, _, high = quantiles(values, n=4, method="inclusive")
        return cls(median(values), low, high)

    @property
    def ratio(self) -> float:
        """How many times the lower quartile the upper one is."""
        if self.high <= self.low:
            return 1.0
        return self.high / self.low if self.low > 0 else math.inf

    def per(self, amount: float) -> "Spread":
        """Return what `amount` in these seconds is a second."""
        return Spread(amount / self.middle, amount / self.high, amount / self.low)

    def times(self, factor: float) -> "Spread":
        """Return so many times as much."""
        return Spread(self.middle * factor, self.low * factor, self.high * factor)


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of what was measured; `unit` is what `spread` counts, "s" or "B/s" say."""

    name: str
    unit: str
    spread: Spread


def seconds_of(
    run: Callable[[], object], budget_s: float, wait: Callable[[], None] = lambda: None
) -> Spread:
    """Time `run` again and again for a while, at least `LEAST_TIMES`; `wait` is for its end."""
    run()
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


def calibration_lines(figures: Sequence[Figure]) -> Iterator[str]:
    """Yield a table of what was measured: medians with their quartiles."""
    rows = [("measured", "median", "quartiles")]
    for figure in figures:
        middle, low, high = (_text(figure, value) for value in figure.spread)
        rows.append((figure.name, middle, f"{low} to {high}"))
    yield from columns(rows, num_left=1)


def comment_of(calibration: "Calibration") -> str:
    """Return what a file says of its figures: what was measured, with its spread."""
    return "\n".join(
        (
            "Written by penstock doctor --calibrate; edit what you know better.  Measured:",
            "",
            *calibration_lines(calibration.figures),
            *([calibration.warning] if calibration.warning else ()),
        )
    )


def as_line(calibration: "Calibration") -> str:
    """Return all of it as one line of JSON."""
    figures = [
        {
            "name": f.name,
            "unit": f.unit,
            **dict(zip(("middle", "low", "high"), f.spread, strict=True)),
        }
        for f in calibration.figures
    ]
    return json.dumps(
        {
            "cluster": json.loads(to_json(calibration.cluster)),
            "figures": figures,
            "warning": calibration.warning,
        }
    )


def _text(figure: Figure, value: float) -> str:
    if figure.unit == "s":
        return time_text(value)
    if figure.unit.endswith("/s"):
        return rate_text(value, figure.unit.removesuffix("/s"))
    return percent_text(value)
