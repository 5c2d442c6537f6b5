"""Parallel text in memory: pairs of texts by source language, to learn from and be judged by."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, Self

from penstock.errors import ConfigError

_MOST_SHOWN = 30

PartName = Literal["train", "valid", "test"]
PART_NAMES: tuple[PartName, ...] = ("train", "valid", "test")


@dataclass(frozen=True, slots=True)
class TextPairs:
    """Texts of one language and their translations: `sources[n]` means `targets[n]`."""

    sources: tuple[str, ...]
    targets: tuple[str, ...]

    @classmethod
    def of(cls, pairs: Iterable[tuple[str, str]]) -> Self:
        """Collect (source, target) pairs."""
        listed = list(pairs)
        return cls(tuple(source for source, _ in listed), tuple(target for _, target in listed))

    def __len__(self) -> int:
        return len(self.sources)


TextPart = Mapping[str, TextPairs]
"""The pairs of each source language; a language without any is left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelCorpus:
    """Texts in many languages with translations into one, `target`."""

    target: str
    train: TextPart
    valid: TextPart
    test: TextPart
    num_skipped: Mapping[str, int]
    """Pairs of each source language that were left out: one side is empty, or they are to be
    learnt from and judged by.
    """

    @property
    def languages(self) -> tuple[str, ...]:
        """The source languages, in alphabetical order."""
        return tuple(sorted({*self.train, *self.valid, *self.test}))

    def __str__(self) -> str:
        sizes = (sum(map(len, part.values())) for part in (self.train, self.valid, self.test))
        counts = ", ".join(
            f"{name} {size:,}" for name, size in zip(PART_NAMES, sizes, strict=True)
        )
        return f"{len(self.languages)} languages to {self.target}: {counts} pairs"


def check_languages(wanted: Iterable[str], known: Iterable[str], where: str) -> None:
    """See that all languages are known.

    Raises:
        ConfigError: some are not; says which, and which there are.
    """
    there = sorted(known)
    unknown = sorted(set(wanted).difference(there))
    if unknown:
        more = f" and {len(there) - _MOST_SHOWN} more" if len(there) > _MOST_SHOWN else ""
        raise ConfigError(
            f"there is no language {', '.join(map(repr, unknown))} in {where}; "
            f"there is {', '.join(there[:_MOST_SHOWN]) or 'none'}{more}"
        )
