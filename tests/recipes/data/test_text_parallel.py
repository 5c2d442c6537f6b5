"""Parallel text in files: found by their names, read line by line, and refused early if wrong."""

from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ConfigError
from penstock_recipes.data.text import ParallelCorpus, TextPairs, load_parallel


def write(path: Path, *lines: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = "".join(f"{line}\n" for line in lines).encode()
    path.write_bytes(content)


NONE = TextPairs((), ())


@pytest.fixture
def german(tmp_path: Path) -> Path:
    write(tmp_path / "train.de-en.de", "Haus", "Baum")
    write(tmp_path / "train.de-en.en", "house", "tree")
    return tmp_path


def test_line_n_belongs_to_line_n(german: Path) -> None:
    corpus = load_parallel(german)
    assert corpus.languages == ("de",) and corpus.target == "en"
    assert corpus.train == {"de": TextPairs(("Haus", "Baum"), ("house", "tree"))}
    assert corpus.valid == {} and corpus.test == {}


def test_any_of_the_two_languages_can_be_the_target(german: Path) -> None:
    assert load_parallel(german, target="de").train == {
        "en": TextPairs(("house", "tree"), ("Haus", "Baum"))
    }


@pytest.mark.parametrize("part", ["train", "valid", "test"])
def test_the_name_says_what_text_is_for(german: Path, part: str) -> None:
    write(german / f"{part}.en-fr.fr", "maison")
    write(german / f"{part}.en-fr.en", "house")
    if part != "train":
        write(german / "train.fr-en.fr", "arbre")
        write(german / "train.fr-en.en", "tree")
    corpus = load_parallel(german)
    found = {"train": corpus.train, "valid": corpus.valid, "test": corpus.test}
    assert found[part]["fr"] == TextPairs(("maison",), ("house",))


@pytest.mark.parametrize("side", ["de", "en"])
def test_a_byte_order_mark_is_no_text(german: Path, side: str) -> None:
    """Else a pair of a test file with it could be learnt from."""
    expected = load_parallel(german)
    path = german / f"train.de-en.{side}"
    lines = path.read_text().splitlines()
    write(path, "\ufeff" + lines[0], *lines[1:])
    assert load_parallel(german) == expected
    write(german / "test.de-en.de", "Haus")
    write(german / "test.de-en.en", "\ufeffhouse")
    corpus = load_parallel(german)
    assert corpus.train == {"de": TextPairs(("Baum",), ("tree",))}
    assert corpus.test == {"de": TextPairs(("Haus",), ("house",))}


def test_only_the_first_byte_order_mark_of_a_file_is_none_of_its_text(tmp_path: Path) -> None:
    write(tmp_path / "train.de-en.de", "\ufeff\ufeffeins", "\ufeffzwei")
    write(tmp_path / "train.de-en.en", "one", "two")
    assert load_parallel(tmp_path).train["de"].sources == ("\ufeffeins", "\ufeffzwei")


def test_other_files_are_left_alone(german: Path) -> None:
    for name in ("README", "LICENSE.txt", "train.de-en.ids", "train.de-en.xml.gz"):
        write(german / name, "not text")
    write(german / "train.de-fr.de", "other languages lack nothing here")
    assert len(load_parallel(german).train["de"]) == 2


def test_pairs_with_an_empty_side_are_left_out_and_counted(tmp_path: Path) -> None:
    write(tmp_path / "train.de-en.de", "Haus", "", "  \t", "Baum", "")
    write(tmp_path / "train.de-en.en", " house\r", "empty", "blank", "", "")
    corpus = load_parallel(tmp_path)
    assert corpus.train == {"de": TextPairs(("Haus",), ("house",))}
    assert corpus.num_skipped == {"de": 4}


def test_only_line_feeds_end_lines(tmp_path: Path) -> None:
    write(tmp_path / "train.de-en.de", "eins\u2028zwei\x0bdrei")
    (tmp_path / "train.de-en.en").write_text("one two three")
    assert load_parallel(tmp_path).train["de"].sources == ("eins\u2028zwei\x0bdrei",)


@pytest.fixture
def large(tmp_path: Path) -> Path:
    for language in ("de", "fr"):
        write(
            tmp_path / f"train.{language}-en.{language}",
            *(f"{language} {n % 900}" for n in range(1000)),
        )
        write(tmp_path / f"train.{language}-en.en", *(f"text {n % 900}" for n in range(1000)))
    write(tmp_path / "test.en-fr.fr", "quatre")
    write(tmp_path / "test.en-fr.en", "four")
    return tmp_path


def test_held_out_pairs_come_from_training_where_there_are_no_files(large: Path) -> None:
    corpus = load_parallel(large, held_out_share=0.1)
    assert corpus.test["fr"].sources == ("quatre",)
    for part in (corpus.valid["fr"], corpus.valid["de"], corpus.test["de"]):
        assert 50 < len(part) < 200
    assert sum(len(part["de"]) for part in (corpus.train, corpus.valid, corpus.test)) == 1000
    assert len(corpus.train["fr"]) + len(corpus.valid["fr"]) == 1000


def test_equal_pairs_are_never_on_both_sides_of_the_split(large: Path) -> None:
    corpus = load_parallel(large, ["de"], held_out_share=0.1)
    trained = set(zip(corpus.train["de"].sources, corpus.train["de"].targets, strict=True))
    held_out = set(corpus.valid["de"].sources) | set(corpus.test["de"].sources)
    assert {source for source, _ in trained}.isdisjoint(held_out)
    assert len(trained) + len(held_out) == 900


def test_the_seed_decides_what_is_held_out(large: Path) -> None:
    def test_part(seed: int) -> TextPairs:
        return load_parallel(large, ["de"], held_out_share=0.1, seed=seed).test["de"]

    assert test_part(0) == test_part(0)
    assert test_part(0) != test_part(1)


def test_fewer_languages_of_a_corpus_are_the_same_pairs(large: Path) -> None:
    corpus = load_parallel(large, held_out_share=0.1)
    one = load_parallel(large, ["de"], held_out_share=0.1)
    assert one.languages == ("de",) and one.train == {"de": corpus.train["de"]}
    assert one.test == {"de": corpus.test["de"]}


def test_a_corpus_prints_its_sizes() -> None:
    pairs = TextPairs(("a",) * 1200, ("b",) * 1200)
    corpus = ParallelCorpus(
        target="en", train={"de": pairs, "fr": pairs}, valid={}, test={"de": pairs}, num_skipped={}
    )
    assert str(corpus) == "2 languages to en: train 2,400, valid 0, test 1,200 pairs"


@pytest.mark.parametrize("part", ["valid", "test"])
def test_a_language_that_is_judged_by_and_not_learnt_is_refused(german: Path, part: str) -> None:
    write(german / f"{part}.fr-en.fr", "maison")
    write(german / f"{part}.fr-en.en", "house")
    with pytest.raises(ConfigError, match=r"'fr' has text to be judged by, but none to learn .*"):
        load_parallel(german)
    assert load_parallel(german, ["de"]).languages == ("de",)
    write(german / "train.fr-en.fr", "maison")
    write(german / "train.fr-en.en", "house")
    with pytest.raises(ConfigError, match=r"'fr' .* \(what is in validation or test too does not"):
        load_parallel(german)


def test_a_language_without_any_text_is_left_out(german: Path) -> None:
    write(german / "test.fr-en.fr", "")
    write(german / "test.fr-en.en", "house")
    assert load_parallel(german).languages == ("de",)


def test_different_numbers_of_lines_are_refused(german: Path) -> None:
    write(german / "train.de-en.de", "a", "b", "")
    write(german / "train.de-en.en", "a")
    with pytest.raises(ConfigError, match=r"de-en.de has 3 lines and .*de-en.en has 1"):
        load_parallel(german)


GERMAN = {"train.de-en.de": b"Haus\nBaum\n", "train.de-en.en": b"house\ntree\n"}
REFUSED: list[tuple[dict[str, bytes], str, dict[str, Any]]] = [
    ({"german.txt": b"Haus"}, "but german.txt; name the files train.de-en.de and", {}),
    (GERMAN, "no language 'fr', 'it' in .*; there is de$", {"languages": ["fr", "de", "it"]}),
    (GERMAN | {"test.de-en.de": b"Weg\n"}, "test.de-en.de lacks its other .*test.de-en.en", {}),
    (
        GERMAN | {"train.de-en.de": "Haus\nBäume\n".encode("latin-1")},
        r"train.de-en.de is not UTF-8: byte 6 \(line 2\)",
        {},
    ),
    (
        GERMAN | {name.replace("de-en", "en-de"): text for name, text in GERMAN.items()},
        "train.de-en.de are both there",
        {},
    ),
    *(
        (GERMAN, f"held_out_share={share}: give a share between", {"held_out_share": share})
        for share in (0.0, 0.25, -1.0)
    ),
]


@pytest.mark.parametrize(("files", "words", "options"), REFUSED)
def test_what_is_no_parallel_text_is_refused(tmp_path, files, words, options) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        load_parallel(tmp_path, **options)


@pytest.mark.parametrize("said", ["nowhere does not exist", "file is a file"])
def test_what_is_no_folder_is_refused(tmp_path: Path, said: str) -> None:
    write(tmp_path / "file")
    with pytest.raises(ConfigError, match=f"{said}; give the folder"):
        load_parallel(tmp_path / said.split()[0])
