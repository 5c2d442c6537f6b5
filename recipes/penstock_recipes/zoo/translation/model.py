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
    """Return what the decoder reads to say `target_BT`: `bos`, then all but the last."""
    first_B1 = target_BT.new_full((len(target_BT), 1), bos)
    return torch.cat((first_B1, target_BT[:, :-1]), dim=1)


def smoothed_cross_entropy(
    logits_BTV: Tensor, target_BT: Tensor, smoothing: float = 0.1, pad: int = 0
) -> Tensor:
    """Compute the mean over real words of the cross entropy with smoothed labels.

    A label is the word with a weight of 1 - smoothing, and all words of the vocabulary evenly with
    the rest (Szegedy et al. 2016; Vaswani et al. 2017, section 5.4).  Words that are `pad` do not
    count; where none is real, the loss is 0.

    As the loss of micro-batches, it goes with a reduction that counts real words:
    `lambda target: (target != pad).sum()`.
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
    """Which of the three matrices of (words, width) are one: source, target, softmax."""

    NOTHING = "nothing"
    """Three matrices."""
    DECODER = "decoder"
    """Two: the softmax matrix is the embedding of the target."""
    ALL = "all"
    """One (Vaswani et al. 2017, section 3.4); the vocabulary is shared in any case."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """The words of both sides, and how long a sentence may be; `pad` is the word that is none."""

    num_words: int
    max_length: int
    pad: int
    tied: Tied


@dataclass(frozen=True, slots=True)
class DecodingState:
    """Where decoding is: how many words there are, and what the next one can look at."""

    length: int
    is_real_B11S: Tensor
    caches: tuple[BlockCache, ...]

    def rows(self, rows_N: Tensor) -> "DecodingState":
        """Return the state of other sentences: row n is what row rows_N[n] was."""

        def pick(tensor: Tensor) -> Tensor:
            return tensor.index_select(0, rows_N)

        caches = tuple(cache.map(pick) for cache in self.caches)
        return DecodingState(self.length, pick(self.is_real_B11S), caches)


class TranslationTransformer(nn.Module):
    """An encoder and a decoder; see `translation_transformer`, which makes it."""

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
        scale = self.target_embedding.scale
        self.head = Linear(shape.width, vocabulary.num_words, normal(1 / scale))
        if vocabulary.tied is not Tied.NOTHING:
            self.head.weight = self.target_embedding.words.weight
        if vocabulary.tied is Tied.ALL:
            self.source_embedding.words.weight = self.target_embedding.words.weight

    def forward(self, source_BS: Tensor, target_BT: Tensor) -> Tensor:
        """Compute logits (B, T, words), each of the word that follows in the target.

        What is `pad` in the source is looked at by nobody.  Pads in the target come last, where
        nothing real looks at them; their logits mean nothing.
        """
        is_real_B11S = self.is_real(source_BS)
        memory_BSD = self.encode(source_BS, is_real_B11S)
        x_BTD = self.target_embedding(target_BT)
        for block in self.decoder:
            x_BTD = block(x_BTD, memory_BSD, is_real_B11S)
        return self._logits(x_BTD)

    def is_real(self, source_BS: Tensor) -> Tensor:
        """Tell which words are no pads: (B, 1, 1, S).

        The first word counts as real, so that a row of pads, which fills up a batch, has something
        to look at and its gradients are numbers.
        """
        is_first_S = torch.arange(source_BS.shape[1], device=source_BS.device) == 0
        return (source_BS.ne(self.pad) | is_first_S).unsqueeze(1).unsqueeze(1)

    def encode(self, source_BS: Tensor, is_real_B11S: Tensor) -> Tensor:
        """Compute what the decoder looks at: (B, S, D)."""
        x_BSD = self.source_embedding(source_BS)
        for block in self.encoder:
            x_BSD = block(x_BSD, is_real_B11S)
        memory_BSD: Tensor = self.encoder_norm(x_BSD)
        return memory_BSD

    def start_decoding(self, source_BS: Tensor) -> DecodingState:
        """Encode the source, once for all words that follow."""
        is_real_B11S = self.is_real(source_BS)
        memory_BSD = self.encode(source_BS, is_real_B11S)
        caches = tuple(block.start(memory_BSD) for block in self._decoder_blocks())
        return DecodingState(0, is_real_B11S, caches)

    def next_word(self, words_B: Tensor, state: DecodingState) -> tuple[Tensor, DecodingState]:
        """Take one more word of each target; give the logits of what follows, (B, words)."""
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

    L = num_layers encoder and as many decoder layers, feed-forward layers of H = ff_width, A =
    num_heads.  Call it with a source (B, S) and a target (B, T) that begins with the word for the
    beginning (see `shift_right`): it gives logits (B, T, num_words).

    The paper's models are T(6, 8192, 16) of 400M parameters, T(24, 8192, 16) and T(12, 16384, 32)
    of 1.3B, T(32, 16384, 32) of 3B and T(64, 16384, 32) of 6B.  (Its text also gives the second
    one 32 heads, which would not be 1.3B.)

    - Heads have 64 channels whatever their number, so that 32 of them have 2048 inside a width of
      1024: the text says that attention channels grow with heads, and the counts need it.
    - `tied`: two matrices of 64,000 words fit the counts best (408M, 1.24B, 1.24B, 3.08B, 6.04B).
      Which two of the three are one is not said; here the softmax has the target's embedding, as
      both are about the same words (Press and Wolf 2017).  A follow-up with the same data says
      473M for the smallest, which are three matrices: "nothing".
    - `depth_scaled`: feed-forward weights start smaller by the factor num_layers ** (-1 / 4), and
      nothing else does.  The paper says that they are scaled down with depth; this is the rule of
      lingvo's XavierWithFixupParams, for two matrices in a layer.  Off, they are drawn by
      Xavier's rule, as the rest.
    - `logit_clip`: in training, logits are clamped to this magnitude, so that predictions do not
      become too sharp and gradients stay finite.  The paper does not say how much; the default is
      not to.
    - Norms stand before the sublayers, and one more after the last block of each side: where norms
      come after the sums, as in Vaswani et al. 2017, tens of layers hardly train.
    - Positions are sinusoids, as in the Transformer that the family comes from.  Only memory
      limits `max_length`; it is there so that a sentence that is too long is told of.
    - Dropout 0.1, of attention weights, of what sublayers add and of embeddings: the follow-ups'.

    Raises:
        ConfigError: a size is below 1, a share or the clip is none, the width is odd, `pad` is no
            word, or `tied` is unknown.
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
