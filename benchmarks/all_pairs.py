"""Choose few of all combinations, so that every two values of two factors meet at least once."""

from collections.abc import Callable, Sequence
from functools import cache, reduce
from itertools import combinations, product
from operator import or_
from typing import Any

Choice = tuple[Any, ...]
"""One value of each factor."""


def all_pairs(
    factors: Sequence[Sequence[Any]],
    shift: int = 0,
    is_possible: Callable[[Choice], bool] = lambda choice: True,
) -> list[Choice]:
    """Choose values of all factors, few times, so that every two values of two factors meet.

    Greedy: each choice is the one, among all, that brings together the most pairs not yet met.
    What is not possible is not chosen, and two values meet if there is a choice with both.
    """

    def values(numbers: tuple[int, ...]) -> Choice:
        return tuple(of[n] for of, n in zip(factors, numbers, strict=True))

    pairs_of = {
        numbers: pairs
        for numbers, pairs in _pairs_of_all(tuple(map(len, factors))).items()
        if is_possible(values(numbers))
    }
    candidates = list(pairs_of)
    first = shift % len(candidates)
    candidates = candidates[first:] + candidates[:first]
    missing = reduce(or_, pairs_of.values())
    chosen = []
    while missing:
        best = max(candidates, key=lambda c: (pairs_of[c] & missing).bit_count())
        missing &= ~pairs_of[best]
        chosen.append(values(best))
    return chosen


@cache
def _pairs_of_all(sizes: tuple[int, ...]) -> dict[tuple[int, ...], int]:
    """Return every choice of one number below each of `sizes`, with its pairs: a bit for each."""
    bits: dict[Any, int] = {}
    return {
        choice: sum(
            1 << bits.setdefault(pair, len(bits)) for pair in combinations(enumerate(choice), 2)
        )
        for choice in product(*map(range, sizes))
    }
