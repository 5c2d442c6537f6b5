"""Measured figures: the median of repeats and the quartiles, as a table and a comment."""

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import TYPE_CHECKING, NamedTuple

from penstock.plain_values import to_json
from penstock.trace.units import columns, percent_text, rate_text, time_text

if TYPE_CHECKING:
    from .calibrate import Calibration
    from .card import Compared

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


def seconds_of(
    run: Callable[[], object], budget_s: float, wait: Callable[[], None] = lambda: None
) -> Spread:
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
