"""Choose few of all combinations, so that every two values of two factors meet at least once."""

from collections import Counter
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

    Greedy: each choice is the one, among all, that brings together the most pairs not yet met,
    and of several such the one whose values have been chosen least so far, so that no value
    stands for all others where it does not matter.  What is not possible is not chosen, and two
    values meet if there is a choice with both.
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
    chosen: list[Choice] = []
    uses: Counter[tuple[int, int]] = Counter()

    def gain(numbers: tuple[int, ...]) -> tuple[int, int]:
        used = sum(uses[value] * len(factors[value[0]]) for value in enumerate(numbers))
        return (pairs_of[numbers] & missing).bit_count(), -used

    while missing:
        best = max(candidates, key=gain)
        missing &= ~pairs_of[best]
        uses.update(enumerate(best))
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
