"""Lay out a table as lines of text."""

from collections.abc import Iterator, Sequence


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
