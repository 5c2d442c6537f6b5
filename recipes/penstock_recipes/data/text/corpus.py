"""Parallel text in memory by source language, and its split by the content of each pair.

Equal pairs stay together, in one language or in two that write them alike.  So no pair is learnt
in one place and tested in another.  The translation of a tested pair may be learnt from other
languages: a model that knows Frankreich and Francia, and the form of Slovak words, can find France
for Francúzsko.  That transfer is what the task measures.
"""

import hashlib
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, Self

from penstock.errors import ConfigError

_MOST_SHOWN = 30
"""Most languages in an error message."""

PartName = Literal["train", "valid", "test"]
PART_NAMES: tuple[PartName, ...] = ("train", "valid", "test")


@dataclass(frozen=True, slots=True)
class TextPairs:
    """Texts of one language and their translations: `targets[n]` translates `sources[n]`."""

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
    """Pairs of each source language that were left out: one side is empty, or a training pair is
    also held out.
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
    """Check that all languages are known.

    Raises:
        ConfigError: some are not; the message lists them, and the known ones.
    """
    there = sorted(known)
    unknown = sorted(set(wanted).difference(there))
    if unknown:
        more = f" and {len(there) - _MOST_SHOWN} more" if len(there) > _MOST_SHOWN else ""
        raise ConfigError(
            f"there is no language {', '.join(map(repr, unknown))} in {where}; "
            f"there is {', '.join(there[:_MOST_SHOWN]) or 'none'}{more}"
        )


def check_shares(share: float) -> None:
    """Check that `share`, once for validation and once for testing, leaves more than a half.

    Raises:
        ConfigError: it does not.
    """
    if not 0 < share < 0.25:
        raise ConfigError(
            f"held_out_share={share}: give a share between 0 and 0.25, such as 0.05; validation "
            "and test take so much each"
        )


def held_out_part(group: str, shares: Mapping[PartName, float], seed: int) -> PartName:
    """Return the part of a group of equal pairs; what no share takes goes to training."""
    digest = hashlib.blake2b(f"{seed}:held out:{group}".encode(), digest_size=8).digest()
    drawn = int.from_bytes(digest, "little") / 2**64
    for part, share in shares.items():
        if drawn < share:
            return part
        drawn -= share
    return "train"


def group_of(source: str, target: str) -> str:
    """Return the key of a pair's group: its texts without case, in NFKC form."""
    return "\t".join(unicodedata.normalize("NFKC", text).casefold() for text in (source, target))
