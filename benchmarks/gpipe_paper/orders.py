"""Which of two cells is greater, in the paper and as predicted: more robust than the numbers."""

from collections.abc import Sequence
from itertools import combinations

from .cells import Cell


def agree(one: Cell, other: Cell) -> bool:
    """Tell whether two cells are in the same order in the paper and as predicted."""
    published, predicted = (
        _difference(one, other, "published"),
        _difference(one, other, "predicted"),
    )
    return published * predicted > 0


def discordant(cells: Sequence[Cell]) -> list[tuple[Cell, Cell]]:
    """Return the pairs of cells whose order was predicted wrongly; equal ones are in none."""
    pairs = combinations(cells, 2)
    return [(a, b) for a, b in pairs if a.published != b.published and not agree(a, b)]


def order_line(cells: Sequence[Cell]) -> str:
    """Say whether more devices, and more micro-batches, are ordered as in the paper."""
    wrong = discordant(cells)
    words = "; ".join(f"{a.what} against {b.what}" for a, b in wrong)
    num_pairs = len(cells) * (len(cells) - 1) // 2
    aligned = [pair for pair in wrong if _shares_k_or_m(*pair)]
    steps = "all" if not aligned else f"all but {len(aligned)}"
    return (
        f"{cells[0].table}, {cells[0].model}: with more devices at one M, or more micro-batches "
        f"at one K, {steps} ordered as published; of all {num_pairs} pairs "
        f"{num_pairs - len(wrong)}" + (f", not {words}." if wrong else ".")
    )


def crossover_line(one: Sequence[Cell], other: Sequence[Cell]) -> str:
    """Say in which cells the model that gains more was predicted, of two models."""
    pairs = [
        (a, b) for a, b in zip(one, other, strict=True) if (a.published, b.published) != (1, 1)
    ]
    right = [a.what for a, b in pairs if agree(a, b)]
    wrong = [a.what for a, b in pairs if not agree(a, b)]
    return (
        f"{one[0].table}: which of the two models gains more is predicted as published in "
        f"{len(right)} of {len(pairs)} cells" + (f", not at {'; '.join(wrong)}." if wrong else ".")
    )


def _difference(one: Cell, other: Cell, name: str) -> float:
    a, b = getattr(one, name), getattr(other, name)
    assert a is not None and b is not None
    return float(a - b)


def _shares_k_or_m(one: Cell, other: Cell) -> bool:
    return bool({*one.what.split(", ")} & {*other.what.split(", ")})
