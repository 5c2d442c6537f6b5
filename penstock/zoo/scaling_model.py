"""The Transformer language model with which GPipe shows how far it scales."""

from collections import OrderedDict

import torch.nn.functional as F
from torch import nn

from .attention import BlockShape, CausalBlock
from .drawn import Draws, Linear, xavier
from .sizes import require_at_least, require_share
from .transformer_sizes import require_even
from .words import SinusoidalEmbedding


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
    and 1663 layers.  All five are num_layers * 50,358,272 + 131,104,000, which settles what the
    text leaves open: linear layers and attention have biases, each block has two LayerNorms, the
    embedding and the softmax matrix are two (untied), the softmax has a bias, and neither the
    positions nor the norm before the head have parameters.

    - Positions are sinusoids, therefore.
    - The norm before the head has no scale and no shift.  Blocks that normalise what they read
      need one there, since what they write adds up; and the head, a linear layer with a bias,
      can take over what such a scale and shift would do.
    - The number of heads is the paper's, 32; the configuration that its authors published
      (lingvo, one_billion_wds.py) has 16, with as many parameters.
    - The paper says nothing of dropout; 0.1, of attention weights, of what sublayers add and of
      the embedding, is that of the published configuration.
    - Weights are drawn as lingvo does by default: Xavier for all matrices, biases 0, vectors of
      words with a variance of 1 / width.

    Raises:
        ConfigError: a size is below 1, a share is none, heads do not divide the width, or it is
            odd.
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
