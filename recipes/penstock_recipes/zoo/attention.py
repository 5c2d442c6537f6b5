"""Attention, feed-forward layers and blocks, shared by all Transformers of the zoo.

Shapes: B sequences, T query positions, S key positions, D channels between blocks, H heads,
C channels of a head.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .drawn import Draws, Linear
from .transformer_sizes import require_heads

Activation = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockShape:
    """The sizes of a block.

    Each head has `head_width` channels, independent of the `width` between blocks.  `dropout` is
    the rate for attention weights and for the output of a sublayer.
    """

    width: int
    num_heads: int
    head_width: int
    ff_width: int
    dropout: float

    @classmethod
    def shared_out(cls, width: int, num_heads: int, ff_width: int, dropout: float) -> "BlockShape":
        """Return a shape whose heads divide the width.

        Raises:
            ConfigError: `num_heads` does not divide `width`.
        """
        require_heads(width, num_heads)
        return cls(
            width=width,
            num_heads=num_heads,
            head_width=width // num_heads,
            ff_width=ff_width,
            dropout=dropout,
        )


class Attention(nn.Module):
    """Multi-head attention (Vaswani et al. 2017, section 3.2.2), with biases.

    It has num_heads * head_width inner channels, which may differ from the width outside.
    """

    def __init__(self, shape: BlockShape, draws: Draws) -> None:
        super().__init__()
        inside = shape.num_heads * shape.head_width
        self.num_heads, self.dropout = shape.num_heads, shape.dropout
        self.query = Linear(shape.width, inside, draws.read)
        self.key = Linear(shape.width, inside, draws.read)
        self.value = Linear(shape.width, inside, draws.read)
        self.output = Linear(inside, shape.width, draws.write)

    def forward(
        self,
        x_BTD: Tensor,
        context_BSD: Tensor,
        mask: Tensor | None = None,
        *,
        causal: bool = False,
    ) -> Tensor:
        """Attend from x to the context.

        `mask` is True where x may attend; its shape broadcasts to (B, H, T, S).  With `causal`,
        each position attends to itself and to earlier ones.
        """
        keys, values = self.keys_values(context_BSD)
        return self.attend(x_BTD, keys, values, mask, causal=causal)

    def keys_values(self, context_BSD: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values: two tensors of (B, H, S, C)."""
        return self._by_head(self.key(context_BSD)), self._by_head(self.value(context_BSD))

    def attend(
        self,
        x_BTD: Tensor,
        keys_BHSC: Tensor,
        values_BHSC: Tensor,
        mask: Tensor | None = None,
        *,
        causal: bool = False,
    ) -> Tensor:
        """Attend from x to the result of `keys_values`."""
        mixed_BHTC = F.scaled_dot_product_attention(
            self._by_head(self.query(x_BTD)),
            keys_BHSC,
            values_BHSC,
            attn_mask=mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=causal,
        )
        result_BTD: Tensor = self.output(mixed_BHTC.transpose(1, 2).flatten(2))
        return result_BTD

    def _by_head(self, x: Tensor) -> Tensor:
        parts: Tensor = x.unflatten(2, (self.num_heads, -1))
        return parts.transpose(1, 2)


class FeedForward(nn.Module):
    """Two linear layers with an activation between, for each position alone."""

    def __init__(self, width: int, ff_width: int, draws: Draws, activation: Activation) -> None:
        super().__init__()
        self.widen = Linear(width, ff_width, draws.read)
        self.activation = activation
        self.narrow = Linear(ff_width, width, draws.write)

    def forward(self, x: Tensor) -> Tensor:
        """Compute (..., D) for (..., D)."""
        result: Tensor = self.narrow(self.activation(self.widen(x)))
        return result


class CausalAttention(nn.Module):
    """x + attention(norm(x)); each position attends to itself and to earlier ones."""

    def __init__(self, shape: BlockShape, draws: Draws) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(shape.width)
        self.attention = Attention(shape, draws)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Compute (B, T, D) for (B, T, D)."""
        normal_BTD = self.norm(x_BTD)
        added_BTD: Tensor = self.dropout(self.attention(normal_BTD, normal_BTD, causal=True))
        return x_BTD + added_BTD


class CausalBlock(nn.Module):
    """A layer of a language model: causal attention and a feed-forward layer, each added.

    The norms come before the sublayers, and not after the sums as in Vaswani et al. 2017: so
    hundreds of layers train, and the warm-up matters less.  GPT-2 does so too, and so do lingvo's
    layers, which GPipe's models use.
    """

    def __init__(self, shape: BlockShape, draws: Draws, activation: Activation) -> None:
        super().__init__()
        self.attention = CausalAttention(shape, draws)
        self.norm = nn.LayerNorm(shape.width)
        self.feed_forward = FeedForward(shape.width, shape.ff_width, draws, activation)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Compute (B, T, D) for (B, T, D)."""
        x_BTD = self.attention(x_BTD)
        added_BTD: Tensor = self.dropout(self.feed_forward(self.norm(x_BTD)))
        return x_BTD + added_BTD


def sinusoids(start: int, length: int, like: Tensor) -> Tensor:
    """Compute the encodings of positions from `start` on (Vaswani et al. 2017, section 3.5).

    (length, D), where D is the last dimension of `like`: first all sines, then all cosines.  The
    paper alternates them; the order does not matter to the linear layers that read them.
    """
    half = like.shape[-1] // 2
    places = torch.arange(start, start + length, device=like.device, dtype=torch.float32)
    powers = torch.arange(half, device=like.device, dtype=torch.float32) / half
    angles = places[:, None] / 10_000**powers
    return torch.cat((angles.sin(), angles.cos()), dim=1).to(like.dtype)
