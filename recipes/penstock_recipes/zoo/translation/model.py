"""GPipe's T(L, H, A): an encoder-decoder Transformer for translation."""

from dataclasses import dataclass
from enum import Enum
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.errors import ConfigError
from penstock_recipes.zoo.attention import BlockShape
from penstock_recipes.zoo.drawn import Draws, Linear, normal, xavier
from penstock_recipes.zoo.transformer_sizes import (
    require_at_least,
    require_even,
    require_positive,
    require_share,
)
from penstock_recipes.zoo.words import SinusoidalEmbedding

from .blocks import BlockCache, BlockDraws, DecoderBlock, EncoderBlock


def shift_right(target_BT: Tensor, bos: int) -> Tensor:
    """Return the decoder's input for `target_BT`: `bos`, then all words except the last."""
    first_B1 = target_BT.new_full((len(target_BT), 1), bos)
    return torch.cat((first_B1, target_BT[:, :-1]), dim=1)


def smoothed_cross_entropy(
    logits_BTV: Tensor, target_BT: Tensor, smoothing: float = 0.1, pad: int = 0
) -> Tensor:
    """Compute the mean cross entropy over real words, with label smoothing.

    A label has weight 1 - smoothing on its word and the rest evenly on all words (Szegedy et al.
    2016; Vaswani et al. 2017, section 5.4).  Padding does not count; without real words the loss
    is 0.

    As a pipeline's loss it needs a reduction that counts real words: `lambda target: (target !=
    pad).sum()`.
    """
    total = F.cross_entropy(
        logits_BTV.flatten(0, 1),
        target_BT.flatten(),
        ignore_index=pad,
        reduction="sum",
        label_smoothing=smoothing,
    )
    return total / (target_BT != pad).sum().clamp(min=1)


class Tied(Enum):
    """The tied matrices among source embedding, target embedding and softmax."""

    NOTHING = "nothing"
    """Three matrices."""
    DECODER = "decoder"
    """Two matrices: the softmax uses the target embedding."""
    ALL = "all"
    """One matrix (Vaswani et al. 2017, section 3.4); the vocabulary is always shared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """The vocabulary of both sides, the padding word and the maximal length of a sentence."""

    num_words: int
    max_length: int
    pad: int
    tied: Tied


@dataclass(frozen=True, slots=True)
class DecodingState:
    """The state of decoding: the number of words so far, the source mask and the caches."""

    length: int
    is_real_B11S: Tensor
    caches: tuple[BlockCache, ...]

    def rows(self, rows_N: Tensor) -> "DecodingState":
        """Select rows: row n of the result is row rows_N[n]."""

        def pick(tensor: Tensor) -> Tensor:
            return tensor.index_select(0, rows_N)

        caches = tuple(cache.map(pick) for cache in self.caches)
        return DecodingState(self.length, pick(self.is_real_B11S), caches)


class TranslationTransformer(nn.Module):
    """An encoder and a decoder; `translation_transformer` builds it."""

    def __init__(
        self,
        num_layers: int,
        shape: BlockShape,
        draws: BlockDraws,
        vocabulary: Vocabulary,
        logit_clip: float | None,
    ) -> None:
        super().__init__()
        self.pad, self.logit_clip = vocabulary.pad, logit_clip
        self.source_embedding = _embedding(shape, vocabulary)
        self.encoder = nn.ModuleList(EncoderBlock(shape, draws) for _ in range(num_layers))
        self.encoder_norm = nn.LayerNorm(shape.width)
        self.target_embedding = _embedding(shape, vocabulary)
        self.decoder = nn.ModuleList(DecoderBlock(shape, draws) for _ in range(num_layers))
        self.decoder_norm = nn.LayerNorm(shape.width)
        # Tie the softmax to the target embedding, and perhaps the source embedding too.
        scale = self.target_embedding.scale
        self.head = Linear(shape.width, vocabulary.num_words, normal(1 / scale))
        if vocabulary.tied is not Tied.NOTHING:
            self.head.weight = self.target_embedding.words.weight
        if vocabulary.tied is Tied.ALL:
            self.source_embedding.words.weight = self.target_embedding.words.weight

    def forward(self, source_BS: Tensor, target_BT: Tensor) -> Tensor:
        """Compute the logits of each next word: (B, T, words).

        Padding of the source is masked.  Padding of the target comes last, so that no real word
        attends to it; its logits mean nothing.
        """
        is_real_B11S = self.is_real(source_BS)
        memory_BSD = self.encode(source_BS, is_real_B11S)
        x_BTD = self.target_embedding(target_BT)
        for block in self.decoder:
            x_BTD = block(x_BTD, memory_BSD, is_real_B11S)
        return self._logits(x_BTD)

    def is_real(self, source_BS: Tensor) -> Tensor:
        """Compute the mask of real words: (B, 1, 1, S).

        The first word always counts as real, so that attention in a row of padding is finite.
        """
        is_first_S = torch.arange(source_BS.shape[1], device=source_BS.device) == 0
        return (source_BS.ne(self.pad) | is_first_S).unsqueeze(1).unsqueeze(1)

    def encode(self, source_BS: Tensor, is_real_B11S: Tensor) -> Tensor:
        """Compute the memory, which the decoder attends to: (B, S, D)."""
        x_BSD = self.source_embedding(source_BS)
        for block in self.encoder:
            x_BSD = block(x_BSD, is_real_B11S)
        memory_BSD: Tensor = self.encoder_norm(x_BSD)
        return memory_BSD

    def start_decoding(self, source_BS: Tensor) -> DecodingState:
        """Encode the source, and return the state before the first word."""
        is_real_B11S = self.is_real(source_BS)
        memory_BSD = self.encode(source_BS, is_real_B11S)
        caches = tuple(block.start(memory_BSD) for block in self._decoder_blocks())
        return DecodingState(0, is_real_B11S, caches)

    def next_word(self, words_B: Tensor, state: DecodingState) -> tuple[Tensor, DecodingState]:
        """Append a word to each target; return the logits of the next word, (B, words)."""
        x_B1D = self.target_embedding(words_B.unsqueeze(1), state.length)
        caches = []
        for block, past in zip(self._decoder_blocks(), state.caches, strict=True):
            x_B1D, cache = block.next(x_B1D, past, state.is_real_B11S)
            caches.append(cache)
        logits_BV = self._logits(x_B1D).squeeze(1)
        return logits_BV, DecodingState(state.length + 1, state.is_real_B11S, tuple(caches))

    def _decoder_blocks(self) -> list[DecoderBlock]:
        return cast(list[DecoderBlock], list(self.decoder))

    def _logits(self, x_BTD: Tensor) -> Tensor:
        logits: Tensor = self.head(self.decoder_norm(x_BTD))
        if self.training and self.logit_clip is not None:
            logits = logits.clamp(-self.logit_clip, self.logit_clip)
        return logits


def translation_transformer(  # noqa: PLR0913 - the front door: each a keyword with a default
    num_layers: int,
    ff_width: int,
    num_heads: int,
    *,
    num_words: int = 64_000,
    width: int = 1024,
    head_width: int = 64,
    max_length: int = 1024,
    pad: int = 0,
    dropout: float = 0.1,
    tied: Tied | str = Tied.DECODER,
    depth_scaled: bool = True,
    logit_clip: float | None = None,
) -> TranslationTransformer:
    """Build T(L, H, A) of GPipe (Huang et al. 2019, arXiv 1811.06965v5, section 5).

    It has L = num_layers encoder layers and L decoder layers, feed-forward layers of H = ff_width,
    and A = num_heads.  Call it with a source (B, S) and a target (B, T) that starts with the begin
    word (see `shift_right`): it returns logits (B, T, num_words).

    The paper's models:

        T(6, 8192, 16)                          400M parameters
        T(24, 8192, 16), T(12, 16384, 32)       1.3B; its text also gives the first one 32 heads
        T(32, 16384, 32)                        3B
        T(64, 16384, 32)                        6B

    - Each head has 64 channels, so that 32 heads have 2048 channels inside a width of 1024.  The
      text says that attention channels grow with heads, and the counts need it.
    - `tied`: two matrices of 64,000 words fit the counts best (408M, 1.24B, 1.24B, 3.08B, 6.04B).
      The paper does not name the tied pair.  Here the softmax uses the target embedding, as both
      are about the same words (Press and Wolf 2017).  A follow-up with the same data counts 473M
      for the smallest model, which means three matrices: "nothing".
    - `depth_scaled`: feed-forward weights start smaller by the factor num_layers ** (-1 / 4).  The
      paper says that they are scaled down with depth; this is the rule of lingvo's
      XavierWithFixupParams for two matrices in a layer.  Otherwise they start by Xavier's rule,
      as all other weights.
    - `logit_clip`: in training, logits are clamped to this magnitude, so that predictions do not
      become too sharp and gradients stay finite.  The paper gives no value; the default is no
      clamping.
    - Norms come before the sublayers, with one more after the last block of each side.  With norms
      after the sums, as in Vaswani et al. 2017, tens of layers hardly train.
    - Positions are sinusoids, as in the original Transformer.  `max_length` costs no parameters;
      it refuses sentences that are too long.
    - The dropout rate of 0.1 for attention weights, outputs of sublayers and embeddings is from
      the follow-ups.

    Raises:
        ConfigError: a size is below 1, a share or the clip is out of bounds, the width is odd,
            `pad` is no word, or `tied` is unknown.
    """
    counts = {"num_layers": num_layers, "ff_width": ff_width, "num_heads": num_heads}
    sizes = {"width": width, "head_width": head_width, "max_length": max_length}
    require_at_least(1, **counts, num_words=num_words, **sizes)
    require_share(dropout=dropout)
    require_even(width)
    if logit_clip is not None:
        require_positive(logit_clip=logit_clip)
    _check_pad(pad, num_words)
    words = Vocabulary(num_words=num_words, max_length=max_length, pad=pad, tied=_tied(tied))
    shape = BlockShape(
        width=width,
        num_heads=num_heads,
        head_width=head_width,
        ff_width=ff_width,
        dropout=dropout,
    )
    scaled = xavier(num_layers ** (-1 / 4) if depth_scaled else 1.0)
    draws = BlockDraws(attention=Draws(xavier(), xavier()), feed_forward=Draws(scaled, scaled))
    return TranslationTransformer(num_layers, shape, draws, words, logit_clip)


def _embedding(shape: BlockShape, vocabulary: Vocabulary) -> SinusoidalEmbedding:
    return SinusoidalEmbedding(
        vocabulary.num_words, shape.width, vocabulary.max_length, shape.dropout
    )


def _tied(tied: Tied | str) -> Tied:
    try:
        return Tied(tied)
    except ValueError:
        known = ", ".join(f'"{choice.value}"' for choice in Tied)
        raise ConfigError(f"tied={tied!r}; choose {known}") from None


def _check_pad(pad: int, num_words: int) -> None:
    if not 0 <= pad < num_words:
        raise ConfigError(
            f"pad={pad} is none of the num_words={num_words} words; "
            f"give a number from 0 to {num_words - 1}"
        )
