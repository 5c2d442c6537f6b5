"""Lay out a table as lines of text."""

from collections.abc import Iterator, Sequence


def columns(rows: Sequence[Sequence[str]], num_left: int | None = None) -> Iterator[str]:
    """Lay out rows of cells, the first `num_left` columns to the left and the others to the right;
    without it, those to the right whose last cell is a number.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    is_number = [
        cell.replace(",", "").isdigit() if num_left is None else n >= num_left
        for n, cell in enumerate(rows[-1])
    ]
    for row in rows:
        cells = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, is_number, strict=True)
        ]
        yield "  ".join(cells).rstrip()
