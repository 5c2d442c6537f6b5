"""A Llama as plain torch layers on the meta device, with no step of its own.

Shapes: B sequences, T positions, H heads, C channels of a head, D = H C channels between blocks.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NUM_WORDS = 32_256
"""32,004, padded to a multiple of 128 for each of four devices, as Megatron-LM does."""


class Block(nn.Module):
    """Attention with rotated queries and keys, then SwiGLU: (B, T, D) -> (B, T, D); no biases."""

    def __init__(self, width: int, ff_width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query, self.key, self.value, self.out = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )
        self.gate, self.up = (nn.Linear(width, ff_width, bias=False) for _ in range(2))
        self.down = nn.Linear(ff_width, width, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Attend, then transform each token; both are added to the input."""
        inner_BTD = self.norm1(x_BTD)
        q_BHTC, k_BHTC, v_BHTC = (
            each(inner_BTD).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for each in (self.query, self.key, self.value)
        )
        heads_BHTC = F.scaled_dot_product_attention(
            _rotated(q_BHTC), _rotated(k_BHTC), v_BHTC, is_causal=True
        )
        x_BTD = x_BTD + self.out(heads_BHTC.transpose(1, 2).flatten(2))
        inner_BTD = self.norm2(x_BTD)
        return x_BTD + self.down(F.silu(self.gate(inner_BTD)) * self.up(inner_BTD))


def _rotated(x_BHTC: Tensor) -> Tensor:
    """Stand for the rotation by positions: move the bytes of a fused kernel, compute nothing."""
    return x_BHTC * 1.0


def llama(num_layers: int, width: int, ff_width: int, num_heads: int) -> nn.Sequential:
    """Build an embedding, blocks, a norm and an untied head: words (B, T) -> (B, T, words).

    The parameters are bfloat16 and on the meta device: they take no memory.
    """
    with torch.device("meta"):
        blocks = (Block(width, ff_width, num_heads) for _ in range(num_layers))
        head = nn.Sequential(nn.RMSNorm(width), nn.Linear(width, NUM_WORDS, bias=False))
        return nn.Sequential(nn.Embedding(NUM_WORDS, width), *blocks, head).bfloat16()
