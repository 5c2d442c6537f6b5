"""The blocks of an encoder, and of a decoder that attends to the encoder's output, the memory.

Shapes: B sentences, S words of the source, T words of the target, D channels between blocks,
H heads, C channels of a head.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock_recipes.zoo.attention import Attention, BlockShape, FeedForward
from penstock_recipes.zoo.drawn import Draws


@dataclass(frozen=True, slots=True)
class BlockDraws:
    """The initialisation of attention and of feed-forward layers."""

    attention: Draws
    feed_forward: Draws


@dataclass(frozen=True, slots=True)
class BlockCache:
    """Keys and values of a decoder block: of the words so far, and of the memory."""

    keys_BHTC: Tensor
    values_BHTC: Tensor
    memory_keys_BHSC: Tensor
    memory_values_BHSC: Tensor

    def map(self, change: Callable[[Tensor], Tensor]) -> "BlockCache":
        """Apply a function to all four tensors."""
        return BlockCache(
            change(self.keys_BHTC),
            change(self.values_BHTC),
            change(self.memory_keys_BHSC),
            change(self.memory_values_BHSC),
        )


class EncoderBlock(nn.Module):
    """Attention to the whole source and a feed-forward layer, with skip connections."""

    def __init__(self, shape: BlockShape, draws: BlockDraws) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(shape.width)
        self.attention = Attention(shape, draws.attention)
        self.feed_forward_norm = nn.LayerNorm(shape.width)
        self.feed_forward = FeedForward(shape.width, shape.ff_width, draws.feed_forward, F.relu)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x_BSD: Tensor, is_real_B11S: Tensor) -> Tensor:
        """Compute (B, S, D) for (B, S, D); padding is masked."""
        normal_BSD = self.attention_norm(x_BSD)
        x_BSD = x_BSD + self.dropout(self.attention(normal_BSD, normal_BSD, is_real_B11S))
        added_BSD: Tensor = self.dropout(self.feed_forward(self.feed_forward_norm(x_BSD)))
        return x_BSD + added_BSD


class DecoderBlock(nn.Module):
    """Causal attention, attention to the memory and a feed-forward layer, each with a skip."""

    def __init__(self, shape: BlockShape, draws: BlockDraws) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(shape.width)
        self.attention = Attention(shape, draws.attention)
        self.memory_norm = nn.LayerNorm(shape.width)
        self.memory_attention = Attention(shape, draws.attention)
        self.feed_forward_norm = nn.LayerNorm(shape.width)
        self.feed_forward = FeedForward(shape.width, shape.ff_width, draws.feed_forward, F.relu)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x_BTD: Tensor, memory_BSD: Tensor, is_real_B11S: Tensor) -> Tensor:
        """Compute (B, T, D) for (B, T, D); `memory_BSD` is the encoder's output."""
        normal_BTD = self.attention_norm(x_BTD)
        x_BTD = x_BTD + self.dropout(self.attention(normal_BTD, normal_BTD, causal=True))
        memory = self.memory_attention.keys_values(memory_BSD)
        return self._attend_to_memory(x_BTD, memory, is_real_B11S)

    def start(self, memory_BSD: Tensor) -> BlockCache:
        """Return the cache before the first word."""
        keys, values = self.memory_attention.keys_values(memory_BSD)
        nothing = keys[:, :, :0]
        return BlockCache(nothing, nothing, keys, values)

    def next(
        self, x_B1D: Tensor, past: BlockCache, is_real_B11S: Tensor
    ) -> tuple[Tensor, BlockCache]:
        """Compute `forward` for one more word; return the cache for the next one too."""
        normal_B1D = self.attention_norm(x_B1D)
        keys, values = self.attention.keys_values(normal_B1D)
        keys = torch.cat((past.keys_BHTC, keys), dim=2)
        values = torch.cat((past.values_BHTC, values), dim=2)
        x_B1D = x_B1D + self.dropout(self.attention.attend(normal_B1D, keys, values))
        memory = past.memory_keys_BHSC, past.memory_values_BHSC
        x_B1D = self._attend_to_memory(x_B1D, memory, is_real_B11S)
        return x_B1D, BlockCache(keys, values, *memory)

    def _attend_to_memory(
        self, x_BTD: Tensor, memory: tuple[Tensor, Tensor], is_real_B11S: Tensor
    ) -> Tensor:
        normal_BTD = self.memory_norm(x_BTD)
        mixed_BTD = self.memory_attention.attend(normal_BTD, *memory, is_real_B11S)
        x_BTD = x_BTD + self.dropout(mixed_BTD)
        added_BTD: Tensor = self.dropout(self.feed_forward(self.feed_forward_norm(x_BTD)))
        return x_BTD + added_BTD
