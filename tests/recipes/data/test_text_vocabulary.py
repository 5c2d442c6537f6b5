"""One vocabulary of subwords: writes every text, speaks all languages, and is told from others."""

import json
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from penstock.errors import CheckpointError, ConfigError
from penstock_recipes.data.text import (
    BOS,
    EOS,
    PAD,
    UNK,
    TextPairs,
    Vocabulary,
    load_names,
    train_text_vocabulary,
    train_vocabulary,
)
from tests.distributed.launch import run_python

LANGUAGES = ("de", "hi", "ja")
SIZE = 800
TRAIN = (
    "from penstock_recipes.data.text import load_names, train_vocabulary\n"
    f"part = load_names({LANGUAGES}, most_pairs={{'ja': 20}}).train\n"
    f"print(train_vocabulary(part, {SIZE}).digest)"
)


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return train_vocabulary(load_names(LANGUAGES, most_pairs={"ja": 20}).train, SIZE)


@pytest.fixture(scope="module")
def of_text() -> Vocabulary:
    return train_text_vocabulary("so it goes, so it went\n" * 50, 300)


def tokens_of(vocabulary: Vocabulary, text: str) -> list[int]:
    (ids,) = vocabulary.encode([text])
    return ids


def test_it_has_the_size_asked_for_and_a_tag_for_each_language(vocabulary: Vocabulary) -> None:
    assert vocabulary.size == SIZE
    assert vocabulary.languages == LANGUAGES
    special = {PAD, BOS, EOS, UNK, *vocabulary.tags.values()}
    assert special == set(range(4 + len(LANGUAGES)))


def test_it_is_as_large_as_the_text_allows() -> None:
    part = {"de": TextPairs(("ab ab",), ("ab",))}
    assert train_vocabulary(part, 5000).size == 4 + 1 + 256 + len([" a", " ab"])


def test_a_source_has_its_language_in_front_and_both_sides_have_an_end(vocabulary) -> None:
    (source,) = vocabulary.encode_sources(["Haus"], "de")
    (target,) = vocabulary.encode_targets(["Haus"])
    assert source == [vocabulary.tags["de"], *target]
    assert target == [*tokens_of(vocabulary, "Haus"), EOS]


def test_a_word_is_the_same_at_the_start_and_inside(vocabulary: Vocabulary) -> None:
    assert tokens_of(vocabulary, "Dollar Dollar") == 2 * tokens_of(vocabulary, "Dollar")


@given(st.text().filter(lambda text: text == text.strip()))
def test_every_text_comes_back_in_its_normal_form(vocabulary: Vocabulary, text: str) -> None:
    once = vocabulary.decode(tokens_of(vocabulary, text))
    assert tokens_of(vocabulary, once) == tokens_of(vocabulary, text)
    assert vocabulary.decode(tokens_of(vocabulary, once)) == once
    assert UNK not in tokens_of(vocabulary, text)


@pytest.mark.parametrize(
    "text", ["हिन्दी भाषा", "日本", "Cote d\u2019Ivoire (1960\u20132002)", "𝄞 🎻"]
)
def test_text_in_any_script_comes_back(vocabulary: Vocabulary, text: str) -> None:
    assert vocabulary.decode(tokens_of(vocabulary, text)) == text


def test_composed_and_decomposed_characters_are_one(vocabulary: Vocabulary) -> None:
    assert tokens_of(vocabulary, "cafe\u0301") == tokens_of(vocabulary, " caf\u00e9 ")


@given(st.text())
def test_plain_text_comes_back_to_the_character(of_text: Vocabulary, text: str) -> None:
    assert of_text.decode(tokens_of(of_text, text)) == text


def test_special_tokens_in_a_text_are_text(vocabulary: Vocabulary, of_text: Vocabulary) -> None:
    text = "<|end|> <|pad|> <de>"
    for one in (vocabulary, of_text):
        assert min(tokens_of(one, text)) >= 4 + len(one.languages)
        assert one.decode(tokens_of(one, text)) == text


def test_decoding_stops_at_the_end_and_shows_no_special_token(vocabulary: Vocabulary) -> None:
    ids = tokens_of(vocabulary, "Haus")
    assert vocabulary.decode([BOS, vocabulary.tags["de"], *ids, PAD]) == "Haus"
    assert vocabulary.decode([*ids, EOS, *ids]) == "Haus"


def test_bytes_that_make_no_character_are_marked(vocabulary: Vocabulary) -> None:
    whole = tokens_of(vocabulary, "🎻")
    assert vocabulary.decode(whole[:-1]).endswith("�")


def test_combining_marks_stay_in_their_words() -> None:
    part = {"hi": TextPairs(("किताब",) * 9, ("book",) * 9)}
    assert len(tokens_of(train_vocabulary(part, 400), "किताब")) == 1


def test_a_high_temperature_hears_languages_with_little_text() -> None:
    part = {
        "de": TextPairs(tuple(f"Wort {n}" for n in range(990)), ("word",) * 990),
        "ja": TextPairs(("せかいじゅうのことば",) * 10, ("word",) * 10),
    }

    def num_tokens(temperature: float) -> int:
        vocabulary = train_vocabulary(part, 290, temperature=temperature, num_pairs=400)
        return len(tokens_of(vocabulary, "せかいじゅうのことば"))

    assert num_tokens(5.0) < num_tokens(1.0)


def test_another_process_makes_the_same_vocabulary(vocabulary: Vocabulary) -> None:
    assert run_python("-c", TRAIN).output.strip() == vocabulary.digest


def test_a_saved_vocabulary_is_the_same_again(vocabulary: Vocabulary, tmp_path: Path) -> None:
    vocabulary.save(tmp_path / "vocabulary.json")
    loaded = Vocabulary.load(tmp_path / "vocabulary.json")
    assert (loaded.size, loaded.tags, loaded.digest) == (
        vocabulary.size,
        vocabulary.tags,
        vocabulary.digest,
    )
    for text in ("Frankreich", "<|end|>", "日本語"):
        assert tokens_of(loaded, text) == tokens_of(vocabulary, text)
    assert [path.name for path in tmp_path.iterdir()] == ["vocabulary.json"]


def test_the_library_reads_the_file_too(vocabulary: Vocabulary, tmp_path: Path) -> None:
    vocabulary.save(tmp_path / "vocabulary.json")
    tokenizer = Tokenizer.from_file(str(tmp_path / "vocabulary.json"))
    assert tokenizer.encode("Frankreich").ids == tokens_of(vocabulary, "Frankreich")


def test_nothing_is_overwritten(vocabulary, of_text, tmp_path) -> None:
    path = tmp_path / "vocabulary.json"
    vocabulary.save(path)
    vocabulary.save(path)
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="exists already and is not this vocabulary"):
        of_text.save(path)
    assert path.read_bytes() == before
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(ConfigError, match="exists already and is not this vocabulary"):
        vocabulary.save(tmp_path / "notes")
    assert (tmp_path / "notes").read_text() == "mine"


def test_a_file_that_is_no_vocabulary_is_refused(vocabulary: Vocabulary, tmp_path: Path) -> None:
    path = tmp_path / "vocabulary.json"
    with pytest.raises(ConfigError, match=r"vocabulary.json does not exist; give the JSON file"):
        Vocabulary.load(path)
    path.write_text('{"a": 1}')
    with pytest.raises(ConfigError, match=r"vocabulary.json holds no vocabulary: "):
        Vocabulary.load(path)
    vocabulary.save(tmp_path / "good.json")
    content = json.loads((tmp_path / "good.json").read_text())
    content["added_tokens"][0]["content"] = "<other>"
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"first tokens are not <\|pad\|> <\|begin\|>"):
        Vocabulary.load(path)


def test_a_vocabulary_that_a_checkpoint_was_not_trained_with_is_refused(vocabulary) -> None:
    vocabulary.check_fits(size=vocabulary.size, digest=vocabulary.digest)
    with pytest.raises(CheckpointError, match="trained with a vocabulary of 8,000 tokens, and th"):
        vocabulary.check_fits(size=8000, digest=vocabulary.digest)
    with pytest.raises(CheckpointError, match=f"vocabulary abc, .* is {vocabulary.digest}; give"):
        vocabulary.check_fits(size=vocabulary.size, digest="abc")


def test_vocabularies_of_one_size_have_different_digests() -> None:
    def digest(word: str) -> str:
        return train_vocabulary({"de": TextPairs((word,) * 9, (word,) * 9)}, 263).digest

    assert digest("aaaa") == digest("aaaa")
    assert digest("aaaa") != digest("bbbb")


def test_languages_sizes_and_texts_that_cannot_be_are_refused(vocabulary: Vocabulary) -> None:
    with pytest.raises(ConfigError, match="no language 'fr' in the vocabulary; there is de, hi"):
        vocabulary.encode_sources(["maison"], "fr")
    with pytest.raises(ConfigError, match=r"of 260 tokens is too small: 1 language tags, .* 261"):
        train_vocabulary({"de": TextPairs(("a",), ("b",))}, 260)
    with pytest.raises(ConfigError, match="there is no pair to learn from"):
        train_vocabulary({}, 1000)


def test_without_tokenizers_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigError, match=r"needs tokenizers, .*penstock-recipes\[translation\]'"):
        train_text_vocabulary("text", 1000)
