"""Parallel text without a download: names from the CLDR data in Babel.

Unicode's Common Locale Data Repository (CLDR) has the names of territories, languages, scripts,
currencies and units in hundreds of languages.  Babel ships with it.  A pair is a name and the
English name of the same thing.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from penstock.errors import ConfigError
from penstock_recipes.data import keyed_generator, optional_library

from .corpus import (
    ParallelCorpus,
    PartName,
    TextPairs,
    check_languages,
    check_shares,
    group_of,
    held_out_part,
)

TARGET = "en"
NAME_KINDS = ("territories", "languages", "currencies", "units")
"""The default kinds of names."""
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
"""Languages with at least 1,000 names that differ from the English ones.

nb, nn and ht are left out, as they inherit missing names from other languages.
"""
_ATTRIBUTES = {
    "territories": "territories",
    "languages": "languages",
    "scripts": "scripts",
    "currencies": "currencies",
    "units": "unit_display_names",
}
"""The attribute of Babel's locale for each kind of name."""


def load_names(
    languages: Sequence[str] = NAME_LANGUAGES,
    *,
    kinds: Sequence[str] = NAME_KINDS,
    most_pairs: Mapping[str, int] | None = None,
    held_out_share: float = 0.05,
    seed: int = 0,
) -> ParallelCorpus:
    """Pair the names of `languages` with the English ones.

    kinds: The kinds: "territories", "languages", "scripts", "currencies", "units".
    most_pairs: Most training pairs of a language, to make it a low-resource one; its pairs for
        validation and testing stay.
    held_out_share: Share of the pairs held out for validation, and again for testing.

    Raises:
        ConfigError: Babel is not installed, or a language, a kind or a number is wrong.
    """
    check_shares(held_out_share)
    limits = dict(most_pairs or {})
    _check(languages, kinds, limits)
    # Pair the names, and split the pairs by their group.
    shares: dict[PartName, float] = {"test": held_out_share, "valid": held_out_share}
    english = names_in(TARGET, kinds)
    parts: dict[PartName, dict[str, TextPairs]] = {"train": {}, "valid": {}, "test": {}}
    for language in languages:
        pairs: dict[PartName, list[tuple[str, str]]] = {part: [] for part in parts}
        for source, target in _pairs(names_in(language, kinds), english):
            group = group_of(source, target)
            pairs[held_out_part(group, shares, seed)].append((source, target))
        if language in limits:
            generator = keyed_generator(seed, "most pairs", language)
            order = torch.randperm(len(pairs["train"]), generator=generator)
            chosen = sorted(order[: limits[language]].tolist())
            pairs["train"] = [pairs["train"][n] for n in chosen]
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
    return optional_library(module, "the names of things in many languages needs", "translation")


def _pairs(
    names: Mapping[tuple[str, str], str], english: Mapping[tuple[str, str], str]
) -> Iterator[tuple[str, str]]:
    """Yield each pair once; a language and its script often share a name, such as Thai."""
    seen = set()
    for item, name in names.items():
        if name and item in english:
            key = group_of(name, english[item])
            if key not in seen:
                seen.add(key)
                yield name, english[item]


def _check(languages: Sequence[str], kinds: Sequence[str], limits: Mapping[str, int]) -> None:
    if not kinds or not set(kinds) <= _ATTRIBUTES.keys():
        raise ConfigError(f"kinds={list(kinds)}: choose among {', '.join(_ATTRIBUTES)}")
    locales = _babel("babel.localedata").locale_identifiers()
    known = [name for name in locales if name.partition("_")[0] != TARGET]
    check_languages(languages, known, "Babel's data (besides English)")
    if not languages or len(set(languages)) < len(languages):
        raise ConfigError(f"languages={list(languages)}: name at least one, and none twice")
    check_languages(limits, languages, "languages, and most_pairs limits it")
    for language, most in limits.items():
        if most < 1:
            raise ConfigError(f"most_pairs={{{language!r}: {most}}}: leave at least 1 pair")
