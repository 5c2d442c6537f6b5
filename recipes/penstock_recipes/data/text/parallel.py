"""Read parallel text from files: line n of one file translates line n of the other.

A folder has two files for each part and language, plain text in UTF-8:

    FOLDER/train.de-en.de    FOLDER/train.de-en.en
    FOLDER/valid.de-en.de    FOLDER/valid.de-en.en
    FOLDER/test.de-en.de     FOLDER/test.de-en.en

Other files are ignored.  All text is held in memory.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from penstock.errors import ConfigError

from .corpus import (
    PART_NAMES,
    ParallelCorpus,
    PartName,
    TextPairs,
    check_languages,
    check_shares,
    group_of,
    held_out_part,
)
from .plain_text import read_text

_FILE = re.compile(rf"({'|'.join(PART_NAMES)})\.(\w+)-(\w+)\.(\w+)")
_Pairs = list[tuple[str, str]]
_Lists = dict[PartName, dict[str, _Pairs]]
"""The pairs of each language in each part."""


def load_parallel(
    folder: Path,
    languages: Sequence[str] | None = None,
    *,
    target: str = "en",
    held_out_share: float | None = None,
    seed: int = 0,
) -> ParallelCorpus:
    """Read the text in `languages`, or in all languages of the folder, translated to `target`.

    Pairs with an empty line are left out and counted, and so are training pairs that are also in
    validation or test.

    held_out_share: Share of the pairs held out for validation, and again for testing, in each
        language without files for it; by default none.

    Raises:
        ConfigError: the folder, or the text of a language, is missing; one side of a text is
            missing, or the sides differ in their numbers of lines; a file is not UTF-8; a
            language has held-out text and no training text.
    """
    # Read the files, without pairs with an empty side.
    if held_out_share is not None:
        check_shares(held_out_share)
    files = _files(folder, target)
    known = sorted({language for _, language in files})
    check_languages(languages or (), known, f"{folder}, as text with a translation to {target}")
    parts: _Lists = {part: {} for part in PART_NAMES}
    num_skipped = dict.fromkeys(languages or known, 0)
    for (part, language), (source, translation) in files.items():
        if language in num_skipped:
            pairs = _pairs(source, translation)
            full = [pair for pair in pairs if all(pair)]
            num_skipped[language] += len(pairs) - len(full)
            parts[part][language] = full
    # Split the training pairs, and remove from them what is held out.
    if held_out_share is not None:
        _hold_out(parts, held_out_share, seed)
    _keep_apart(parts, num_skipped)
    return ParallelCorpus(
        target=target,
        train=_packed(parts["train"]),
        valid=_packed(parts["valid"]),
        test=_packed(parts["test"]),
        num_skipped=num_skipped,
    )


def _packed(part: Mapping[str, _Pairs]) -> dict[str, TextPairs]:
    return {language: TextPairs.of(part[language]) for language in sorted(part) if part[language]}


def _keep_apart(parts: _Lists, num_skipped: dict[str, int]) -> None:
    """Remove training pairs that are held out in any language.

    Raises:
        ConfigError: a language has held-out pairs only; the vocabulary would have no tag for it.
    """
    held_out = {
        group_of(*pair)
        for part in ("valid", "test")
        for pairs in parts[part].values()
        for pair in pairs
    }
    for language, pairs in parts["train"].items():
        others = [pair for pair in pairs if group_of(*pair) not in held_out]
        num_skipped[language] += len(pairs) - len(others)
        parts["train"][language] = others
    judged = {name for part in ("valid", "test") for name, pairs in parts[part].items() if pairs}
    if unlearnt := [name for name in sorted(judged) if not parts["train"].get(name)]:
        raise ConfigError(
            f"language {', '.join(map(repr, unlearnt))} has text to be judged by, but none to "
            "learn from (what is in validation or test too does not count); add training files, "
            "or leave it out: name the other languages in data.languages"
        )


def _hold_out(parts: _Lists, share: float, seed: int) -> None:
    """Move training pairs to the parts for which a language has no files."""
    for language, pairs in parts["train"].items():
        lacking: tuple[PartName, ...] = ("test", "valid")
        shares = {part: share for part in lacking if language not in parts[part]}
        parts["train"][language] = []
        for pair in pairs:
            part = held_out_part(group_of(*pair), shares, seed)
            parts[part].setdefault(language, []).append(pair)


def _files(folder: Path, target: str) -> dict[tuple[PartName, str], tuple[Path, Path]]:
    """Return both files of each part and source language, in alphabetical order.

    Raises:
        ConfigError: there is no folder, no such pair of files, or a file without its other side.
    """
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise ConfigError(f"{folder} {what}; give the folder of the parallel text")
    # A name such as train.de-en.de is one side of the pair (train, de).
    files: dict[tuple[PartName, str], tuple[Path, Path]] = {}
    for path in sorted(folder.iterdir()):
        match = _FILE.fullmatch(path.name)
        if match is None or not {target, match[4]} <= {match[2], match[3]}:
            continue
        part = next(name for name in PART_NAMES if name == match[1])
        language = match[3] if match[2] == target else match[2]
        pair = (path.with_suffix(f".{language}"), path.with_suffix(f".{target}"))
        if missing := [side for side in pair if not side.is_file()]:
            raise ConfigError(f"{path} lacks its other side, {missing[0]}; put it there")
        if files.setdefault((part, language), pair) != pair:
            raise ConfigError(f"{path} and {files[part, language][0]} are both there; join them")
    if not files:
        there = ", ".join(sorted(path.name for path in folder.iterdir())[:5]) or "nothing"
        raise ConfigError(
            f"{folder} has no text with a translation to {target}, but {there}; name the files "
            f"train.de-{target}.de and train.de-{target}.{target}, and valid and test likewise"
        )
    return files


def _pairs(source: Path, target: Path) -> _Pairs:
    """Read the lines of two files, stripped of white space.

    Raises:
        ConfigError: a file is not UTF-8, or their numbers of lines differ.
    """
    sides = [read_text(path).removesuffix("\n").split("\n") for path in (source, target)]
    sources, targets = ([line.strip() for line in lines] for lines in sides)
    if len(sources) != len(targets):
        raise ConfigError(
            f"{source} has {len(sources):,} lines and {target} has {len(targets):,}; line n of "
            "one must be the translation of line n of the other, so get both files anew"
        )
    return list(zip(sources, targets, strict=True))
