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
    with pytest.raises(
        ConfigError, match="has 5 tokens, and a window of 5 needs 6; give a longer"
    ):
        text_windows("12345", ByteVocabulary(), 5)
    with pytest.raises(ConfigError, match="has 0 tokens"):
        text_windows("", ByteVocabulary(), 5)
    with pytest.raises(ConfigError, match="length=0: a window needs at least 1 token"):
        text_windows("12345", ByteVocabulary(), 0)


def test_text_that_is_not_utf_8_is_refused_with_its_place(file: Path) -> None:
    file.write_bytes("eins\nzwei\ndrei Häuser".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"not UTF-8: byte 16 \(line 3\) is 0xe4; convert it"):
        load_text(file)


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing does not exist; give a text file"):
        load_text(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="is a folder; give a text file"):
        load_text(tmp_path)


def test_a_file_too_short_to_be_split_is_refused(file: Path) -> None:
    file.write_text("short")
    with pytest.raises(ConfigError, match=r"has 5 characters, too few to keep a share of 0\.05"):
        load_text(file)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_share_beyond_0_and_1_is_refused(file: Path, share: float) -> None:
    with pytest.raises(ConfigError, match=f"valid_share={share}: give a share between 0 and 1"):
        load_text(file, share)
