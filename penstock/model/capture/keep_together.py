"""Blocks that are to be on one stage: `together`."""

from collections.abc import Collection, Iterable, Iterator, Sequence

from penstock.errors import CutError

from .blocks import fits
from .routes import Call

Groups = tuple[frozenset[str], ...]
"""Names of blocks that belong together."""


def find_groups(
    together: Sequence[str] | Sequence[Sequence[str]] | None,
    blocks: Collection[str],
    argument: str = "together",
) -> Groups:
    """Resolve patterns of names, in one list or in several, to the blocks that they fit.

    Raises:
        CutError: a pattern fits no block.
    """
    lists = _lists(together or ())
    return tuple(frozenset(_matching(patterns, blocks, argument)) for patterns in lists)


def _lists(together: Sequence[str] | Sequence[Sequence[str]]) -> list[list[str]]:
    alone = [entry for entry in together if isinstance(entry, str)]
    several = [list(entry) for entry in together if not isinstance(entry, str)]
    return [*([alone] if alone else []), *several]


def _matching(patterns: Iterable[str], blocks: Collection[str], argument: str) -> Iterator[str]:
    for pattern in patterns:
        found = [name for name in blocks if fits(_beginning(name, pattern), pattern)]
        if not found:
            raise CutError(
                f"{argument} names {pattern!r}, which fits no block; there are {', '.join(blocks)}"
            )
        yield from found


def _beginning(name: str, pattern: str) -> str:
    """Give as many parts of a name as a pattern has: a block may have been opened since."""
    return ".".join(name.split(".")[: pattern.count(".") + 1])


def ranges_of(groups: Groups, calls: Sequence[Call]) -> tuple[tuple[int, int], ...]:
    """Give the first and last call of each group; groups that overlap are one."""
    found = []
    for group in groups:
        places = [place for place, (block, _) in enumerate(calls) if block in group]
        if places:
            found.append((places[0], places[-1]))
    merged: list[tuple[int, int]] = []
    for first, last in sorted(found):
        if merged and first <= merged[-1][1]:
            first, last = merged[-1][0], max(last, merged.pop()[1])
        merged.append((first, last))
    return tuple(merged)
