"""Lay out a table as lines of text."""

from collections.abc import Iterator, Sequence


def columns(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lay out rows of cells; what looks like a number stands right in its column."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    is_number = [rows[-1][n].replace(",", "").isdigit() for n in range(len(widths))]
    for row in rows:
        cells = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, is_number, strict=True)
        ]
        yield "  ".join(cells).rstrip()
