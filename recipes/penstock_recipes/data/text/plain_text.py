"""Read a UTF-8 file for a language model, as tokens in windows of one length.

The last share of the file is held out for validation.
"""

import hashlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from penstock.errors import ConfigError

_BYTE_ORDER_MARK = "\ufeff"
"""The mark that some editors write before a text in UTF-8."""


class TextVocabulary(Protocol):
    """Encodes text as tokens and back: `ByteVocabulary`, or a `Vocabulary` of subwords."""

    size: int
    digest: str

    def encode(self, texts: Sequence[str]) -> Iterator[list[int]]: ...

    def decode(self, ids: Iterable[int]) -> str: ...


class ByteVocabulary:
    """The bytes of UTF-8 as tokens, without training or another library.

    A `size` above 256 stands in for subwords that are not trained yet.
    """

    def __init__(self, size: int = 256) -> None:
        self.size = size
        self.digest = hashlib.blake2b(b"the bytes of UTF-8", digest_size=16).hexdigest()

    def encode(self, texts: Sequence[str]) -> Iterator[list[int]]:
        """Yield the bytes of each text."""
        return (list(text.encode()) for text in texts)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of bytes; invalid ones become �."""
        return bytes(ids).decode(errors="replace")


@dataclass(frozen=True, slots=True)
class TextSplit:
    """The training text, and the validation text after it."""

    train: str
    valid: str


def load_text(path: Path, valid_share: float = 0.05) -> TextSplit:
    """Read a text, and hold out the last `valid_share` of its characters for validation.

    Raises:
        ConfigError: there is no such file, it is not UTF-8, or too short to be split.
    """
    if not 0 < valid_share < 1:
        raise ConfigError(f"valid_share={valid_share}: give a share between 0 and 1, such as 0.05")
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise ConfigError(f"{path} {what}; give a text file, as --set data.path=FILE")
    text = read_text(path)
    cut = round(len(text) * (1 - valid_share))
    if not 0 < cut < len(text):
        raise ConfigError(
            f"{path} has {len(text)} characters, too few to keep a share of {valid_share} for "
            "validation; give a longer text"
        )
    return TextSplit(text[:cut], text[cut:])


def read_text(path: Path) -> str:
    """Read a file of UTF-8, without a byte order mark at its start.

    Raises:
        ConfigError: it is not UTF-8.
    """
    content = path.read_bytes()
    try:
        return content.decode().removeprefix(_BYTE_ORDER_MARK)
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{path} is not UTF-8: byte {error.start} (line {line}) is "
            f"0x{content[error.start]:02x}; convert it, say with iconv -f LATIN1 -t UTF-8"
        ) from None


@dataclass(frozen=True, slots=True)
class Windows:
    """A text as windows of `length` tokens, end to end; a rest at the end is unused."""

    tokens: Tensor
    """int32."""
    length: int

    def __len__(self) -> int:
        return max(0, len(self.tokens) - 1) // self.length

    def batch(self, windows: Tensor) -> tuple[Tensor, Tensor]:
        """Return windows (int64, (B,)), and the token that follows each token: int64, (B, T)."""
        places_BT = windows[:, None] * self.length + torch.arange(self.length)
        return self.tokens[places_BT].to(torch.int64), self.tokens[places_BT + 1].to(torch.int64)


def text_windows(text: str, vocabulary: TextVocabulary, length: int) -> Windows:
    """Encode a text as windows of `length` tokens.

    Raises:
        ConfigError: the text is too short for one window.
    """
    if length < 1:
        raise ConfigError(f"length={length}: a window needs at least 1 token")
    ids = chain.from_iterable(vocabulary.encode(text.splitlines(keepends=True)))
    tokens = torch.from_numpy(np.array(array("i", ids)))
    windows = Windows(tokens, length)
    if not len(windows):
        raise ConfigError(
            f"the text has {len(tokens)} tokens, and a window of {length} needs {length + 1}; "
            "give a longer text (a part of it is for validation), or shorter windows"
        )
    return windows
