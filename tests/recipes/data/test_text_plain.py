"""Plain text for a language model: read whole or refused, split, and cut into windows."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock_recipes.data import batch_indices, epoch_order
from penstock_recipes.data.text import (
    ByteVocabulary,
    TextVocabulary,
    load_text,
    text_windows,
    train_text_vocabulary,
)

TEXT = "Es war einmal …\r\n\n  Übermut tut selten gut.\n" * 40


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_bytes(TEXT.encode())
    return path


@pytest.mark.parametrize("share", [0.05, 0.5])
def test_the_end_of_the_file_is_for_validation(file: Path, share: float) -> None:
    split = load_text(file, share)
    assert split.train + split.valid == TEXT
    assert len(split.valid) == pytest.approx(share * len(TEXT), abs=1)


def test_a_byte_order_mark_is_no_text(file: Path) -> None:
    expected = load_text(file)
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    assert load_text(file) == expected
    file.write_bytes(b"\xef\xbb\xbfH\xe4user")
    with pytest.raises(ConfigError, match=r"byte 4 \(line 1\) is 0xe4"):
        load_text(file)


@pytest.mark.slow
@given(st.text(min_size=20), st.integers(1, 7))
def test_windows_give_back_the_text(text: str, length: int) -> None:
    vocabulary = ByteVocabulary()
    windows = text_windows(text, vocabulary, length)
    inputs_BT, targets_BT = windows.batch(torch.arange(len(windows)))
    assert inputs_BT.shape == targets_BT.shape == (len(windows), length)
    used = list(text.encode())[: len(windows) * length + 1]
    assert inputs_BT.flatten().tolist() == used[:-1]
    assert targets_BT.flatten().tolist() == used[1:]
    assert len(text.encode()) - len(used) < length


def vocabularies() -> list[TextVocabulary]:
    return [ByteVocabulary(), train_text_vocabulary(TEXT, 290)]


@pytest.mark.parametrize("vocabulary", vocabularies(), ids=["bytes", "subwords"])
def test_tokens_are_the_text(vocabulary: TextVocabulary) -> None:
    windows = text_windows(TEXT, vocabulary, 10)
    assert vocabulary.decode(windows.tokens.tolist()) == TEXT
    assert int(windows.tokens.min()) >= 0 and int(windows.tokens.max()) < vocabulary.size


def test_subwords_are_fewer_than_bytes() -> None:
    as_bytes, as_subwords = (len(text_windows(TEXT, v, 10)) for v in vocabularies())
    assert as_subwords < as_bytes


def test_vocabularies_have_digests_of_their_own() -> None:
    digests = [v.digest for v in (*vocabularies(), train_text_vocabulary(TEXT, 280))]
    assert len(set(digests)) == 3
    assert ByteVocabulary().digest == digests[0]


def test_bytes_that_make_no_character_are_marked() -> None:
    assert ByteVocabulary().decode([65, 0xFF, 66]) == "A�B"


def test_the_batches_of_an_epoch_are_its_windows() -> None:
    windows = text_windows(TEXT, ByteVocabulary(), 16)
    order = epoch_order(len(windows), seed=2, epoch=1)
    inputs_BT, targets_BT = windows.batch(batch_indices(order, batch=1, batch_size=4))
    assert inputs_BT.dtype == targets_BT.dtype == torch.int64
    start = 16 * int(order[4])
    assert inputs_BT[0].tolist() == list(TEXT.encode()[start : start + 16])


def test_a_text_that_just_fits_has_one_window() -> None:
    assert len(text_windows("12345", ByteVocabulary(), 4)) == 1
    for text, length, words in (
        ("12345", 5, "has 5 tokens, and a window of 5 needs 6; give a longer"),
        ("", 5, "has 0 tokens"),
        ("12345", 0, "length=0: a window needs at least 1 token"),
    ):
        with pytest.raises(ConfigError, match=words):
            text_windows(text, ByteVocabulary(), length)


@pytest.mark.parametrize(
    ("content", "share", "words"),
    [
        ("eins\nzwei\ndrei Häuser", 0.05, r"not UTF-8: byte 16 \(line 3\) is 0xe4; convert it"),
        ("short", 0.05, r"has 5 characters, too few to keep a share of 0\.05"),
        ("plain " * 40, 0.0, "valid_share=0.0: give a share between 0 and 1"),
        ("plain " * 40, 1.0, "valid_share=1.0: give a share between 0 and 1"),
        (None, 0.05, "text.txt does not exist; give a text file"),
    ],
)
def test_what_is_no_text_to_be_split_is_refused(file, content, share, words) -> None:
    file.write_bytes((content or "").encode("latin-1"))
    if content is None:
        file.unlink()
    with pytest.raises(ConfigError, match=words):
        load_text(file, share)
    with pytest.raises(ConfigError, match="is a folder; give a text file"):
        load_text(file.parent)
