"""What is written of the translations can be read again, whatever is in the texts."""

import csv
from pathlib import Path

from penstock_recipes.data.text import ParallelCorpus, TextPairs, encode_part, train_vocabulary
from penstock_recipes.train.tasks.translated import judge

PLAIN = TextPairs(("Haus", "Baum"), ("house", "tree"))
ODD = TextPairs(
    ("a\tb", "a\u2028b", "a\x0bb", "a\rb", "a\x85b", '"a" b'),
    ('say "b"', "a\\tb", "a\x1cb", "'a'", "a\r\tb", "a,b"),
)
TRANSLATIONS = {"de": ["house", ""], "fr": ["", "a\nb", '"', "a\tb\r", "a\r\nb", "\\N"]}


def written(folder: Path, *languages: str) -> Path:
    test = {language: {"de": PLAIN, "fr": ODD}[language] for language in languages}
    corpus = ParallelCorpus(target="en", train=test, valid={}, test=test, num_skipped={})
    encoded = encode_part(test, train_vocabulary(test, 300), max_length=99)
    judge({name: TRANSLATIONS[name] for name in languages}, encoded, corpus, folder)
    return folder / "translations.tsv"


def test_texts_with_tabs_and_ends_of_lines_are_read_back_as_they_were(tmp_path: Path) -> None:
    with written(tmp_path, "de", "fr").open(encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file, "excel-tab", strict=True))
    expected = [
        [language, *texts]
        for language, pairs in (("de", PLAIN), ("fr", ODD))
        for texts in zip(pairs.sources, pairs.targets, TRANSLATIONS[language], strict=True)
    ]
    assert rows == expected


def test_plain_texts_are_not_quoted(tmp_path: Path) -> None:
    content = written(tmp_path, "de").read_bytes()
    assert content == b"de\tHaus\thouse\thouse\nde\tBaum\ttree\t\n"
