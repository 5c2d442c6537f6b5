"""GShard's mixture of experts, as a language model in the sizes at which Alpa measures."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.errors import ConfigError
from penstock_recipes.zoo.attention import BlockShape, CausalAttention, CausalBlock
from penstock_recipes.zoo.drawn import Draws, Linear, normal, xavier
from penstock_recipes.zoo.transformer_sizes import (
    require_at_least,
    require_even,
    require_positive,
    require_share,
    sizes_of,
)
from penstock_recipes.zoo.words import SinusoidalEmbedding

from .mixture import Mixture, MixtureShape

GSHARD_SIZES = {
    "380M": {"num_layers": 8, "width": 768, "num_heads": 16, "num_experts": 8},
    "690M": {"num_layers": 8, "width": 768, "num_heads": 16, "num_experts": 16},
    "1.3B": {"num_layers": 16, "width": 768, "num_heads": 16, "num_experts": 16},
    "2.4B": {"num_layers": 16, "width": 1024, "num_heads": 16, "num_experts": 16},
    "10B": {"num_layers": 16, "width": 1536, "num_heads": 16, "num_experts": 32},
    "27B": {"num_layers": 16, "width": 2048, "num_heads": 16, "num_experts": 48},
    "70B": {"num_layers": 32, "width": 2048, "num_heads": 16, "num_experts": 64},
}
"""Those of Alpa's evaluation (Zheng et al. 2022, arXiv 2201.12023, section 8)."""


class MixtureBlock(nn.Module):
    """Causal attention, then a mixture of experts."""

    def __init__(self, shape: BlockShape, mixture: MixtureShape, draws: Draws) -> None:
        super().__init__()
        self.attention = CausalAttention(shape, draws)
        self.norm = nn.LayerNorm(shape.width)
        self.mixture = Mixture(mixture, draws, F.relu)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Compute (B, T, D) for (B, T, D), and the balance loss of the mixture."""
        x_BTD = self.attention(x_BTD)
        added_BTD, balance = self.mixture(self.norm(x_BTD))
        return x_BTD + self.dropout(added_BTD), balance


class GShard(nn.Module):
    """A language model with mixtures of experts; see `gshard_moe`, which makes it."""

    def __init__(
        self, embedding: SinusoidalEmbedding, blocks: nn.ModuleList, *, tied: bool
    ) -> None:
        super().__init__()
        num_words, width = embedding.words.weight.shape
        self.embedding, self.blocks = embedding, blocks
        self.norm = nn.LayerNorm(width)
        self.head = Linear(width, num_words, normal(1 / embedding.scale), bias=False)
        if tied:
            self.head.weight = embedding.words.weight

    def forward(self, words_BT: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Compute logits (B, T, words), in training with the balance losses of all mixtures."""
        x_BTD = self.embedding(words_BT)
        balance = torch.zeros((), device=words_BT.device)
        for block in self.blocks:
            if isinstance(block, MixtureBlock):
                x_BTD, own_balance = block(x_BTD)
                balance = balance + own_balance
            else:
                x_BTD = block(x_BTD)
        logits: Tensor = self.head(self.norm(x_BTD))
        return (logits, balance) if self.training else logits


def gshard_moe(  # noqa: PLR0913 - the front door: each a keyword with a default
    size: str | None = None,
    *,
    num_layers: int | None = None,
    width: int | None = None,
    num_heads: int | None = None,
    num_experts: int | None = None,
    num_words: int = 32_000,
    max_length: int = 1024,
    capacity_factor: float = 1.0,
    random_second: bool = True,
    dropout: float = 0.1,
    tied: bool = True,
) -> GShard:
    """Build a language model with experts (GShard, Lepikhin et al. 2020, arXiv 2006.16668).

    Words (B, T) -> (logits (B, T, num_words), balance loss) in training, logits in evaluation.
    The balance loss is a scalar, the sum over all mixtures; add it to the loss, times a weight
    such as 0.01.  `size` is one of GSHARD_SIZES; `num_layers`, `width`, `num_heads` and
    `num_experts` replace what it says, or are given without it.

    - Every other block has a mixture of experts for its feed-forward layer: the second, the
      fourth and so on.  All experts have parameters of their own.
    - GShard translates, with an encoder and a decoder.  Alpa measures language models, and so is
      this.
    - Feed-forward layers, experts or not, are 8 * width wide: that is GShard's ratio, and the only
      one with which the sizes have the parameters that their names say, with `tied` embeddings.
    - A group, which shares an expert's places, is one sequence: then the results do not depend on
      what else is in a micro-batch.  (GShard cuts all positions of a batch into equal groups.)
    - `capacity_factor` 1 is the paper's: places for 2 * T / E positions of each group.  What finds
      no place passes by, on the way around the sublayer.
    - `random_second`: in training, the second expert sees a position with a chance of twice its
      weight, as in the paper; otherwise always.  In evaluation always.  Off, there is less noise,
      and more positions that find no place.
    - Second choices take their places after all first choices of the sequence, later ones too: in
      this one way, which GShard's decoder has as well, a position knows something of the future.
    - Norms stand before the sublayers, weights are drawn by Xavier's rule and positions are
      sinusoids, as in `transformer_lm`: the paper does not say.

    Raises:
        ConfigError: nobody knows `size`; a size is missing or too small, a share or the capacity
            factor is none, heads do not divide the width, or it is odd.
    """
    given = {"num_layers": num_layers, "width": width}
    given |= {"num_heads": num_heads, "num_experts": num_experts}
    sizes = sizes_of(size, GSHARD_SIZES, given)
    require_at_least(1, **sizes, num_words=num_words, max_length=max_length)
    require_share(dropout=dropout)
    require_positive(capacity_factor=capacity_factor)
    wide = sizes["width"]
    block = BlockShape.shared_out(wide, sizes["num_heads"], 8 * wide, dropout)
    require_even(wide)
    _check_mixtures(sizes["num_layers"], sizes["num_experts"])
    mixture = MixtureShape(
        width=wide,
        ff_width=8 * wide,
        num_experts=sizes["num_experts"],
        capacity_factor=capacity_factor,
        random_second=random_second,
    )
    embedding = SinusoidalEmbedding(num_words, wide, max_length, dropout)
    draws = Draws(read=xavier(), write=xavier())
    blocks = nn.ModuleList(
        MixtureBlock(block, mixture, draws) if number % 2 else CausalBlock(block, draws, F.relu)
        for number in range(sizes["num_layers"])
    )
    return GShard(embedding, blocks, tied=tied)


def _check_mixtures(num_layers: int, num_experts: int) -> None:
    if num_experts < 2:
        raise ConfigError(
            f"num_experts={num_experts}, but each position goes to two; give at least 2"
        )
    if num_layers < 2:
        raise ConfigError(
            f"num_layers={num_layers}, but it is each second layer that has experts; "
            "give at least 2"
        )
