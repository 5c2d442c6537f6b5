"""Write times, shares and sizes in readable units, and tables as text."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Unit(NamedTuple):
    """A unit of time: its number in a second, and its sign."""

    per_s: int
    sign: str


def unit_for(duration_s: float) -> Unit:
    """Pick seconds from 1 s on, microseconds below 0.1 ms, milliseconds between."""
    if duration_s >= 1:
        return Unit(1, "s")
    return Unit(1_000, "ms") if duration_s >= 1e-4 or not duration_s else Unit(1_000_000, "µs")


def time_text(duration_s: float) -> str:
    """Write a duration with three significant digits and its unit."""
    unit = unit_for(duration_s)
    value = float(duration_s * unit.per_s)
    return f"{value:.0f} {unit.sign}" if value >= 999.5 else f"{value:.3g} {unit.sign}"


def percent_text(share: float) -> str:
    """Write a share as per cent with one decimal."""
    return f"{float(share):.1%}"


def bytes_text(num_bytes: float) -> str:
    """Write a number of bytes with three significant digits, at most in GiB."""
    for sign in ("bytes", "KiB", "MiB"):
        if num_bytes < 999.5:
            return f"{num_bytes:.3g} {sign}"
        num_bytes /= 1024
    return f"{num_bytes:.3g} GiB" if num_bytes < 999.5 else f"{num_bytes:.0f} GiB"


def count_text(number: int, noun: str) -> str:
    """Write a number with its noun, in the plural where it is not 1."""
    ending = "" if number == 1 else "es" if noun.endswith(("ch", "ss")) else "s"
    return f"{number:,} {noun}{ending}"


def number_text(number: float) -> str:
    """Write a number with four significant digits, or all before the point."""
    return f"{number:,.0f}" if number >= 999.95 else f"{number:.4g}"


def columns(rows: Sequence[Sequence[str]], num_left: int | None = None) -> Iterator[str]:
    """Lay out rows of cells: the first `num_left` columns left-aligned, the others right-aligned.

    Without `num_left`, a column is right-aligned whose last cell is a number.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    is_right = [
        cell.replace(",", "").isdigit() if num_left is None else n >= num_left
        for n, cell in enumerate(rows[-1])
    ]
    for row in rows:
        cells = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, is_right, strict=True)
        ]
        yield "  ".join(cells).rstrip()


_SIGNS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def rate_text(per_s: float, unit: str) -> str:
    """Write so many of a unit a second, with three significant digits."""
    for size, sign in _SIGNS:
        if per_s >= size * 0.9995:
            return f"{per_s / size:.3g} {sign}{unit}/s"
    return f"{per_s:.3g} {unit}/s"
