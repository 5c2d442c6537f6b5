"""What all Transformers of the zoo share: attention, feed-forward layers, blocks of both.

Shapes: B sequences, T positions that look, S positions that are looked at, D channels between
blocks, H heads, C channels of a head.
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

    Heads have `head_width` channels each, whatever the `width` between blocks is; `dropout` is the
    share that is dropped of attention weights, and of what a sublayer adds.
    """

    width: int
    num_heads: int
    head_width: int
    ff_width: int
    dropout: float

    @classmethod
    def shared_out(cls, width: int, num_heads: int, ff_width: int, dropout: float) -> "BlockShape":
        """Return a shape whose heads share out the width.

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

    Inside there are num_heads * head_width channels, which need not be the width outside.
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
        """Let x look at the context.

        A `mask` is True where x may look, and has a shape like (B, H, T, S) or one that broadcasts
        to it; `causal` lets each position look at itself and what is before it.
        """
        keys, values = self.keys_values(context_BSD)
        return self.attend(x_BTD, keys, values, mask, causal=causal)

    def keys_values(self, context_BSD: Tensor) -> tuple[Tensor, Tensor]:
        """Return what can be looked at: two tensors of (B, H, S, C)."""
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
        """Let x look at what `keys_values` gave."""
        found_BHTC = F.scaled_dot_product_attention(
            self._by_head(self.query(x_BTD)),
            keys_BHSC,
            values_BHSC,
            attn_mask=mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=causal,
        )
        mixed_BTD: Tensor = self.output(found_BHTC.transpose(1, 2).flatten(2))
        return mixed_BTD

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
    """x + attention(norm(x)), where each position looks at itself and what is before it."""

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

    The norms come before the sublayers, and not after the sums as in Vaswani et al. 2017: then
    hundreds of layers train, without a warm-up being decisive (GPT-2 and lingvo's layers, of which
    GPipe's models are made, do so too).
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
    paper has them in turns; for the linear layers that read them the order means nothing.
    """
    half = like.shape[-1] // 2
    places = torch.arange(start, start + length, device=like.device, dtype=torch.float32)
    powers = torch.arange(half, device=like.device, dtype=torch.float32) / half
    angles = places[:, None] / 10_000**powers
    return torch.cat((angles.sin(), angles.cos()), dim=1).to(like.dtype)
