"""Parallel text in files: line n of one file means the same as line n of the other.

The files are named as OPUS (opus.nlpl.eu) names them, plain or compressed, in folders of any
depth; a language may have several pairs of files:

    FOLDER/**/CORPUS.de-en.de      or CORPUS.de-en.de.gz
    FOLDER/**/CORPUS.de-en.en      or CORPUS.de-en.en.gz

What they are for is said by a word (train, valid, validation, dev or test) at one of three places,
and is training if nothing says otherwise:

    FOLDER/**/CORPUS.de-en-test.de   after the languages, as in OPUS-100
    FOLDER/**/test.de-en.de          in the name of the corpus, between dots, hyphens, underscores
    FOLDER/**/test/**/CORPUS.de-en.de    as a folder

Other files are left alone, and a byte order mark at the start of a file is no text.  All text is
held in memory.
"""

import gzip
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

from penstock.errors import ConfigError

from .corpus import ParallelCorpus, PartName, TextPairs, check_languages
from .held_out import HoldOut, check_hold_out, check_shares, group_of, held_out_part
from .plain_text import BYTE_ORDER_MARK

_WORDS: dict[str, PartName] = {
    "train": "train",
    "valid": "valid",
    "validation": "valid",
    "dev": "valid",
    "test": "test",
}
_LANGUAGE = "[A-Za-z][A-Za-z0-9_@]*"
_FILE = re.compile(
    rf"(?P<stem>(?:(?P<corpus>.+)\.)?(?P<first>{_LANGUAGE})-(?P<second>{_LANGUAGE})"
    rf"(?:-(?P<word>{'|'.join(_WORDS)}))?)\.(?P<side>{_LANGUAGE}?)(?:\.gz)?"
)
_Lists = dict[PartName, dict[str, list[tuple[str, str]]]]
"""Pairs of each language, by what they are for."""


@dataclass(frozen=True, slots=True)
class _Side:
    """A file with one side of the text; the other side has the same `stem`."""

    path: Path
    stem: Path
    part: PartName
    languages: frozenset[str]
    side: str


@dataclass(frozen=True, slots=True)
class _Files:
    """Two files whose lines belong together."""

    language: str
    part: PartName
    source: Path
    target: Path


def load_parallel(
    folder: Path,
    languages: Sequence[str] | None = None,
    *,
    target: str = "en",
    hold_out: HoldOut = "pair",
    held_out_share: float | None = None,
    seed: int = 0,
) -> ParallelCorpus:
    """Read the text in `languages`, or in all that there are, with its translation to `target`.

    Left out and counted are pairs of lines of which one is empty, and training pairs that are in
    validation or test too.

    hold_out: Whether pairs are kept from training, or whatever has a translation that is in
        validation or test, in any language: text of many languages often has the same one; see
        held_out.py.
    held_out_share: Share of the pairs that is kept for validation, and the same again for testing,
        in each language that has no files for it; by default only what has such files is.

    Raises:
        ConfigError: there is no such folder, no such text, or none in a language; one side of some
            text lacks, or the sides differ in their numbers of lines; a file is not UTF-8 or
            damaged; a language has text to be judged by and none to learn from.  All files are
            looked at before any error is raised.
    """
    if held_out_share is not None:
        check_shares("held_out_share", held_out_share)
    check_hold_out(hold_out)
    found = _files(folder, target)
    known = sorted({files.language for files in found})
    check_languages(languages or (), known, f"{folder}, as text with a translation to {target}")
    wanted = [files for files in found if files.language in (languages or known)]
    texts = _read_all(wanted)
    parts: _Lists = {"train": {}, "valid": {}, "test": {}}
    num_skipped = dict.fromkeys(sorted({files.language for files in wanted}), 0)
    for files, lines in zip(wanted, texts, strict=True):
        full = [pair for pair in lines if all(pair)]
        num_skipped[files.language] += len(lines) - len(full)
        parts[files.part].setdefault(files.language, []).extend(full)
    if held_out_share is not None:
        _hold_out(parts, hold_out, held_out_share, seed)
    _keep_apart(parts, hold_out, num_skipped)
    _check_learnt(parts)
    return ParallelCorpus(
        target=target,
        train=_packed(parts["train"]),
        valid=_packed(parts["valid"]),
        test=_packed(parts["test"]),
        num_skipped=num_skipped,
    )


def _packed(part: Mapping[str, list[tuple[str, str]]]) -> dict[str, TextPairs]:
    return {language: TextPairs.of(part[language]) for language in sorted(part) if part[language]}


def _keep_apart(parts: _Lists, hold_out: HoldOut, num_skipped: dict[str, int]) -> None:
    """Take pairs out of training that are to be judged by, in whatever language they are."""
    judged = {
        group_of(*pair, hold_out)
        for part in ("valid", "test")
        for pairs in parts[part].values()
        for pair in pairs
    }
    for language, pairs in parts["train"].items():
        kept = [pair for pair in pairs if group_of(*pair, hold_out) not in judged]
        num_skipped[language] += len(pairs) - len(kept)
        parts["train"][language] = kept


def _check_learnt(parts: _Lists) -> None:
    """See that no language is only judged by: the vocabulary has no tag for such a one.

    Raises:
        ConfigError: some are.
    """
    judged = {name for part in ("valid", "test") for name, pairs in parts[part].items() if pairs}
    if unlearnt := [name for name in sorted(judged) if not parts["train"].get(name)]:
        raise ConfigError(
            f"language {', '.join(map(repr, unlearnt))} has text to be judged by, but none to "
            "learn from (what is in validation or test too does not count); add training files, "
            "or leave it out: name the other languages in data.languages"
        )


def _hold_out(parts: _Lists, hold_out: HoldOut, share: float, seed: int) -> None:
    """Move training pairs to the parts that a language has no files for."""
    for language, pairs in parts["train"].items():
        lacking: tuple[PartName, ...] = ("test", "valid")
        shares = {part: share for part in lacking if language not in parts[part]}
        parts["train"][language] = []
        for source, target in pairs:
            part = held_out_part(group_of(source, target, hold_out), shares, seed)
            parts[part].setdefault(language, []).append((source, target))


def _files(folder: Path, target: str) -> list[_Files]:
    """Return the pairs of files with translations to `target`, in alphabetical order.

    Raises:
        ConfigError: there is no folder, or no such pair in it, or a file without its other side.
    """
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise ConfigError(f"{folder} {what}; give the folder of the parallel text")
    by_stem: dict[Path, dict[str, list[_Side]]] = {}
    for side in _sides(folder):
        if target in side.languages:
            by_stem.setdefault(side.stem, {}).setdefault(side.side, []).append(side)
    if not by_stem:
        raise ConfigError(_without_text(folder, target))
    pairs, faults = [], []
    for stem, sides in sorted(by_stem.items()):
        twice = [side for same in sides.values() for side in same[1:]]
        (languages,) = {side.languages for same in sides.values() for side in same}
        if twice:
            faults.append(f"{twice[0].path} is there both plain and compressed; keep one of them")
        elif missing := sorted(languages.difference(sides)):
            (there,) = (same[0].path for same in sides.values())
            faults.append(f"{there} lacks its other side, {stem}.{missing[0]} (or .gz)")
        else:
            (language,) = languages - {target}
            source, translation = sides[language][0], sides[target][0]
            pairs.append(_Files(language, source.part, source.path, translation.path))
    _raise(faults)
    return pairs


def _sides(folder: Path) -> Iterator[_Side]:
    for path in sorted(folder.rglob("*")):
        match = _FILE.fullmatch(path.name)
        if match is None or not path.is_file():
            continue
        languages = frozenset([match["first"], match["second"]])
        if len(languages) == 2 and match["side"] in languages:
            folders = path.relative_to(folder).parent.parts
            words = [*folders, *re.split("[._-]", match["corpus"] or ""), match["word"]]
            part = _part_named(words, path)
            yield _Side(path, path.parent / match["stem"], part, languages, match["side"])


def _part_named(words: Iterable[str | None], path: Path) -> PartName:
    named = {_WORDS[word] for word in words if word in _WORDS}
    if len(named) > 1:
        raise ConfigError(
            f"{path} is named for {' and '.join(sorted(named))}; rename it or its folder, so that "
            "one word is left"
        )
    return named.pop() if named else "train"


def _without_text(folder: Path, target: str) -> str:
    there = ", ".join(sorted(path.name for path in folder.iterdir())[:5]) or "nothing"
    return (
        f"{folder} has no text with a translation to {target}, but {there}; name the files "
        f"CORPUS.de-{target}.de and CORPUS.de-{target}.{target}, plain or with .gz"
    )


def _read_all(wanted: Sequence[_Files]) -> list[list[tuple[str, str]]]:
    """Read pairs of files.

    Raises:
        ConfigError: some cannot be read, or their numbers of lines differ; names all of them.
    """
    texts, faults = [], []
    for files in wanted:
        try:
            sources, targets = list(_lines(files.source)), list(_lines(files.target))
        except ConfigError as error:
            faults.append(str(error))
            continue
        if len(sources) != len(targets):
            faults.append(
                f"{files.source} has {len(sources):,} lines and {files.target} has "
                f"{len(targets):,}; line n of one must be the translation of line n of the other, "
                "so get both files anew"
            )
        texts.append(list(zip(sources, targets, strict=False)))
    _raise(faults)
    return texts


def _lines(path: Path) -> Iterator[str]:
    """Read the lines of a file, without white space at their ends.

    Raises:
        ConfigError: the file is not UTF-8, or is damaged.
    """
    number = 0
    try:
        with _opened(path) as file:
            for line in file:
                number += 1
                text = line.decode()
                yield (text.removeprefix(BYTE_ORDER_MARK) if number == 1 else text).strip()
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}, line {number}: byte {error.start} of the line is not UTF-8; convert it, say "
            f"with iconv -f LATIN1 -t UTF-8"
        ) from None
    except (EOFError, gzip.BadGzipFile, zlib.error, OSError) as error:
        raise ConfigError(f"{path}, after line {number}: {error}; get the file anew") from None


def _opened(path: Path) -> IO[bytes]:
    is_compressed = path.suffix == ".gz"
    return cast(IO[bytes], gzip.open(path, "rb")) if is_compressed else path.open("rb")


def _raise(faults: Sequence[str]) -> None:
    if faults:
        raise ConfigError("\n".join(faults))
