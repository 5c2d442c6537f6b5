"""Real parallel text without a download: the names of things in the CLDR data in Babel.

Unicode's Common Locale Data Repository has the names of territories, languages, scripts,
currencies and units in hundreds of languages, and Babel ships with them.  Each name in a language
and the same thing's name in English are a pair.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from penstock.errors import ConfigError
from penstock_recipes.data import keyed_generator

from .corpus import ParallelCorpus, PartName, TextPairs, check_languages
from .held_out import check_shares, group_of, held_out_part
from .vocabulary import optional_library

TARGET = "en"
NAME_KINDS = ("territories", "languages", "currencies", "units")
# fmt: off
NAME_LANGUAGES = (
    "am", "ar", "ast", "az", "be", "bg", "bn", "br", "brx", "bs", "ca", "ccp", "chr", "cs", "cv",
    "da", "de", "dsb", "el", "es", "et", "eu", "fa", "fi", "fr", "ga", "gl", "gu", "he", "hi",
    "hr", "hsb", "hu", "hy", "is", "it", "ja", "ka", "kab", "kgp", "kk", "km", "kn", "ko", "kok",
    "ky", "lb", "lo", "lt", "lv", "mk", "ml", "mn", "mr", "my", "ne", "no", "or", "pa", "pcm",
    "pl", "ps", "pt", "ro", "ru", "sc", "si", "sk", "sl", "sq", "sr", "sv", "ta", "te", "th",
    "ti", "tk", "to", "tr", "ug", "uk", "ur", "vi", "yrl", "yue", "zh",
)
# fmt: on
"""Those with at least 1,000 names that differ from the English ones.

Without nb, nn and ht, which take over what they lack from other languages.
"""
_ATTRIBUTES = {
    "territories": "territories",
    "languages": "languages",
    "scripts": "scripts",
    "currencies": "currencies",
    "units": "unit_display_names",
}
"""Where a locale of Babel has each kind of name."""


def load_names(
    languages: Sequence[str] = NAME_LANGUAGES,
    *,
    kinds: Sequence[str] = NAME_KINDS,
    most_pairs: Mapping[str, int] | None = None,
    held_out_share: float = 0.05,
    seed: int = 0,
) -> ParallelCorpus:
    """Pair the names of `languages` with the English ones.

    kinds: Which names: "territories", "languages", "scripts", "currencies", "units".
    most_pairs: How many training pairs a language may keep, which makes it a low-resource one;
        its pairs for validation and testing stay.
    held_out_share: Share of the pairs kept for validation, and as much again for testing.

    Raises:
        ConfigError: Babel is not installed, or a language, a kind or a number cannot be.
    """
    check_shares("held_out_share", held_out_share)
    _check_kinds(kinds)
    _check_names(languages)
    limits = dict(most_pairs or {})
    _check_limits(limits, languages)
    shares: dict[PartName, float] = {"test": held_out_share, "valid": held_out_share}
    english = names_in(TARGET, kinds)
    parts: dict[PartName, dict[str, TextPairs]] = {"train": {}, "valid": {}, "test": {}}
    for language in languages:
        pairs: dict[PartName, list[tuple[str, str]]] = {part: [] for part in parts}
        for source, target in _pairs(names_in(language, kinds), english):
            group = group_of(source, target)
            pairs[held_out_part(group, shares, seed)].append((source, target))
        if language in limits:
            pairs["train"] = _some(pairs["train"], limits[language], language, seed)
        for part, listed in pairs.items():
            if listed:
                parts[part][language] = TextPairs.of(listed)
    return ParallelCorpus(target=TARGET, **parts, num_skipped=dict.fromkeys(languages, 0))


def names_in(language: str, kinds: Sequence[str]) -> dict[tuple[str, str], str]:
    """Return the names in a language by (kind, code), such as ("territories", "FR").

    Raises:
        ConfigError: Babel is not installed.
    """
    locale = _babel("babel").Locale.parse(language)
    return {
        (kind, code): name.strip()
        for kind in kinds
        for code, entry in getattr(locale, _ATTRIBUTES[kind]).items()
        if isinstance(name := entry.get("long") if kind == "units" else entry, str)
    }


def _babel(module: str) -> Any:
    return optional_library(module, "the names of things in many languages")


def _pairs(
    names: Mapping[tuple[str, str], str], english: Mapping[tuple[str, str], str]
) -> Iterator[tuple[str, str]]:
    """Yield each pair once; a language and its script often have one name, as Thai has."""
    seen = set()
    for item, name in names.items():
        if name and item in english:
            key = group_of(name, english[item])
            if key not in seen:
                seen.add(key)
                yield name, english[item]


def _some(
    pairs: list[tuple[str, str]], most: int, language: str, seed: int
) -> list[tuple[str, str]]:
    generator = keyed_generator(seed, "most pairs", language)
    chosen = torch.randperm(len(pairs), generator=generator)[:most]
    return [pairs[n] for n in sorted(chosen.tolist())]


def _check_kinds(kinds: Sequence[str]) -> None:
    unknown = [kind for kind in kinds if kind not in _ATTRIBUTES]
    if unknown or not kinds:
        raise ConfigError(f"kinds={list(kinds)}: choose among {', '.join(_ATTRIBUTES)}")


def _check_names(languages: Sequence[str]) -> None:
    there = _babel("babel.localedata").locale_identifiers()
    known = [name for name in there if name.partition("_")[0] != TARGET]
    check_languages(languages, known, "Babel's data (besides English)")
    if not languages or len(set(languages)) < len(languages):
        raise ConfigError(f"languages={list(languages)}: name at least one, and none twice")


def _check_limits(limits: Mapping[str, int], languages: Sequence[str]) -> None:
    check_languages(limits, languages, "languages, and most_pairs limits it")
    for language, most in limits.items():
        if most < 1:
            raise ConfigError(f"most_pairs={{{language!r}: {most}}}: leave at least 1 pair")
