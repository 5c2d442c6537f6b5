"""Embeddings of words and their positions."""

import math

import torch
from torch import Tensor, nn

from penstock.errors import ConfigError

from .attention import sinusoids
from .drawn import Draw, Embedding, normal


class SinusoidalEmbedding(nn.Module):
    """Words and sinusoidal positions (Vaswani et al. 2017, sections 3.4 and 3.5), then dropout.

    Vectors start with a variance of 1 / width and are multiplied by sqrt(width), so that the
    softmax can use the same matrix.
    """

    def __init__(self, num_words: int, width: int, max_length: int, dropout: float) -> None:
        super().__init__()
        self.max_length, self.scale = max_length, math.sqrt(width)
        self.words = Embedding(num_words, width, normal(1 / self.scale))
        self.dropout = nn.Dropout(dropout)

    def forward(self, words_BT: Tensor, start: int = 0) -> Tensor:
        """Compute (B, T, D) for words at the positions from `start` on.

        Raises:
            ConfigError: a position is not below `max_length`.
        """
        length = words_BT.shape[1]
        check_length(start + length, self.max_length)
        x_BTD = self.words(words_BT) * self.scale
        placed_BTD: Tensor = self.dropout(x_BTD + sinusoids(start, length, x_BTD))
        return placed_BTD


class LearnedEmbedding(nn.Module):
    """Words and learned positions (Radford et al. 2018), then dropout."""

    def __init__(
        self, num_words: int, width: int, max_length: int, dropout: float, draw: Draw
    ) -> None:
        super().__init__()
        self.max_length = max_length
        self.words = Embedding(num_words, width, draw)
        self.positions = Embedding(max_length, width, draw)
        self.dropout = nn.Dropout(dropout)

    def forward(self, words_BT: Tensor) -> Tensor:
        """Compute (B, T, D).

        Raises:
            ConfigError: there are more than `max_length` words.
        """
        length = words_BT.shape[1]
        check_length(length, self.max_length)
        places_T = torch.arange(length, device=words_BT.device)
        placed_BTD: Tensor = self.dropout(self.words(words_BT) + self.positions(places_T))
        return placed_BTD


def check_length(length: int, max_length: int) -> None:
    """Refuse a sequence that is longer than a model's maximum.

    Raises:
        ConfigError: names both lengths.
    """
    if length > max_length:
        raise ConfigError(
            f"a sequence of {length} words is longer than the model's max_length={max_length}; "
            f"cut it, or build the model with max_length={length}"
        )
