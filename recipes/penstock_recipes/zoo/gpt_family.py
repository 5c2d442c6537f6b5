"""GPT-3's decoder in the sizes of Alpa's evaluation, and GPipe's Transformer language model."""

import math
from collections import OrderedDict
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from .attention import BlockShape, CausalBlock
from .drawn import Draws, Linear, normal, xavier
from .transformer_sizes import require_at_least, require_even, require_share, sizes_of
from .words import LearnedEmbedding, SinusoidalEmbedding

_STD = 0.02
"""Standard deviation of GPT's initial weights."""

GPT_SIZES = {
    "350M": {"num_layers": 24, "width": 1024, "num_heads": 16},
    "760M": {"num_layers": 24, "width": 1536, "num_heads": 16},
    "1.3B": {"num_layers": 24, "width": 2048, "num_heads": 32},
    "2.6B": {"num_layers": 32, "width": 2560, "num_heads": 32},
    "6.7B": {"num_layers": 32, "width": 4096, "num_heads": 32},
    "15B": {"num_layers": 48, "width": 5120, "num_heads": 40},
    "39B": {"num_layers": 48, "width": 8192, "num_heads": 64},
}
"""Alpa's sizes (Zheng et al. 2022, arXiv 2201.12023, section 8; 760M is from its code)."""


class GPT(nn.Module):
    """A decoder; `gpt` builds it."""

    def __init__(self, embedding: LearnedEmbedding, blocks: nn.ModuleList, *, tied: bool) -> None:
        super().__init__()
        num_words, width = embedding.words.weight.shape
        self.embedding, self.blocks = embedding, blocks
        self.norm = nn.LayerNorm(width)
        self.head = Linear(width, num_words, normal(_STD), bias=False)
        if tied:
            self.head.weight = embedding.words.weight

    def forward(self, words_BT: Tensor) -> Tensor:
        """Compute the logits of each next word: (B, T, words)."""
        x_BTD = self.embedding(words_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        logits: Tensor = self.head(self.norm(x_BTD))
        return logits


def gpt(  # noqa: PLR0913 - the front door: each a keyword with a default
    size: str | None = None,
    *,
    num_layers: int | None = None,
    width: int | None = None,
    num_heads: int | None = None,
    num_words: int = 51_200,
    max_length: int = 1024,
    dropout: float = 0.1,
    tied: bool = True,
) -> GPT:
    """Build a decoder of the GPT-3 family (Brown et al. 2020, arXiv 2005.14165, section 2.1).

    Words (B, T) -> logits (B, T, num_words).  `size` is one of GPT_SIZES; `num_layers`, `width`
    and `num_heads` override it, or replace it.

    - Norms before the sublayers and before the head, learned positions, GELU, feed-forward layers
      of 4 * width.  GPT-3 makes every other attention sparse; Alpa, Megatron and this model do
      not.
    - GELU is the tanh approximation of GPT-2's published code.
    - Weights are normal with a standard deviation of 0.02, biases 0.  The output weights of
      sublayers are divided by sqrt(2 * num_layers) (Radford et al. 2019, section 2.3).  For
      positions GPT-2's code has 0.01 and its later ports 0.02, as here.
    - `tied` shares one matrix between embedding and softmax, as GPT does.  Alpa and Megatron
      measured with two matrices (tied=False).  The sizes are named after the tied models: "350M"
      untied has 408M parameters.  The softmax has no bias.
    - 51,200 words, as Alpa: GPT-2's 50,257 and a few unused ones, so that many devices can share
      them.

    Raises:
        ConfigError: `size` is unknown; a size is missing or below 1, `dropout` is out of bounds,
            or heads do not divide the width.
    """
    single = {"num_layers": num_layers, "width": width, "num_heads": num_heads}
    sizes = sizes_of(size, GPT_SIZES, single)
    require_at_least(1, **sizes, num_words=num_words, max_length=max_length)
    require_share(dropout=dropout)
    total, wide = sizes["num_layers"], sizes["width"]
    shape = BlockShape.shared_out(wide, sizes["num_heads"], 4 * wide, dropout)
    embedding = LearnedEmbedding(num_words, wide, max_length, dropout, normal(_STD))
    draws = Draws(read=normal(_STD), write=normal(_STD / math.sqrt(2 * total)))
    blocks = nn.ModuleList(
        CausalBlock(shape, draws, partial(F.gelu, approximate="tanh")) for _ in range(total)
    )
    return GPT(embedding, blocks, tied=tied)


def transformer_lm(  # noqa: PLR0913 - the front door: each a keyword with a default
    num_layers: int,
    *,
    width: int = 2048,
    ff_width: int = 8192,
    num_heads: int = 32,
    num_words: int = 32_000,
    max_length: int = 1024,
    dropout: float = 0.1,
) -> nn.Sequential:
    """Build the scaling model of GPipe (Huang et al. 2019, arXiv 1811.06965v5, section 3).

    Words (B, T) -> logits (B, T, num_words).  Layers: embedding, `num_layers` blocks, norm, head.

    Table 1 of the paper gives 282.2M, 785.8M, 5.3B, 21.0B and 83.9B parameters for 3, 13, 103, 415
    and 1663 layers.  All five are num_layers * 50,358,272 + 131,104,000, which settles details
    that the text leaves open.  Linear layers and attention have biases, and each block has two
    LayerNorms.  The embedding and the softmax matrix are untied, and the softmax has a bias.
    Neither the positions nor the norm before the head have parameters.

    - So positions are sinusoids.
    - The norm before the head has no scale and no shift.  Blocks with norms at their inputs need a
      norm there, since their outputs add up.  The head, a linear layer with a bias, can learn the
      effect of a scale and a shift.
    - The number of heads is the paper's, 32; the published configuration (lingvo,
      one_billion_wds.py) has 16, with the same number of parameters.
    - The paper does not mention dropout.  The rate of 0.1 for attention weights, outputs of
      sublayers and the embedding is that of the published configuration.
    - Weights are initialised as by lingvo's defaults: Xavier for all matrices, biases 0, word
      vectors with a variance of 1 / width.

    Raises:
        ConfigError: a size is below 1, a share is out of bounds, heads do not divide the width,
            or the width is odd.
    """
    counts = {"num_layers": num_layers, "width": width, "ff_width": ff_width}
    require_at_least(1, **counts, num_heads=num_heads, num_words=num_words, max_length=max_length)
    require_share(dropout=dropout)
    shape = BlockShape.shared_out(width, num_heads, ff_width, dropout)
    require_even(width)
    draws = Draws(read=xavier(), write=xavier())
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    layers["embedding"] = SinusoidalEmbedding(num_words, width, max_length, dropout)
    for number in range(num_layers):
        layers[f"block{number}"] = CausalBlock(shape, draws, F.relu)
    layers["norm"] = nn.LayerNorm(width, elementwise_affine=False)
    layers["head"] = Linear(width, num_words, xavier())
    return nn.Sequential(layers)
