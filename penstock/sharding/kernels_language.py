"""Kernels of what language models are made of."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .kernels import Local, kernel
from .layouts import S


class _Attention(NamedTuple):
    """The arguments of attention: queries (..., H, T, C), keys and values (..., H, S, C)."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    @property
    def bias(self) -> Tensor | None:
        """What is added to the scores."""
        allowed = self.attn_mask
        if self.is_causal:
            scores = self.query.shape[-2], self.key.shape[-2]
            allowed = torch.ones(scores, dtype=torch.bool, device=self.query.device).tril()
        if allowed is None or allowed.dtype is not torch.bool:
            return allowed
        nothing = torch.zeros_like(allowed, dtype=self.query.dtype)
        return nothing.masked_fill(~allowed, float("-inf"))

    def weights(self) -> Tensor:
        """Compute the weights as torch does where it has no kernel that does all at once."""
        scale = self.query.shape[-1] ** -0.5 if self.scale is None else self.scale
        key, half = self._for_each_head(self.key), abs(scale) ** 0.5
        sign = -half if scale < 0 else half
        scores = (self.query * sign) @ (key.transpose(-2, -1) * half)
        if self.bias is not None:
            scores = scores + self.bias
        # who may look at nothing has weights of 0, and no gradient that is none
        nothing = (scores == float("-inf")).all(-1, keepdim=True)
        found: Tensor = scores.masked_fill(nothing, 0.0).softmax(-1).masked_fill(nothing, 0.0)
        return found

    def values(self) -> Tensor:
        """Return the values, of each head."""
        return self._for_each_head(self.value)

    def _for_each_head(self, x: Tensor) -> Tensor:
        if not self.enable_gqa or x.shape[-3] == self.query.shape[-3]:
            return x
        return x.repeat_interleave(self.query.shape[-3] // x.shape[-3], -3)


@kernel("scaled_dot_product_attention")
def _attention(func: Any, args: Any, kwargs: Any, local: Local) -> Tensor:
    """Draw which weights are dropped for all heads, so that they are those of one device."""
    given, (layout,) = _Attention(*args, **kwargs), local.sized.gives
    if not given.dropout_p or not any(isinstance(state, S) for state in layout):
        found: Tensor = func(*args, **kwargs)
        return found
    weights = given.weights()
    rows = local.whole_shape(weights.shape[:-1], layout)
    ones = torch.ones((*rows, weights.shape[-1]), dtype=weights.dtype, device=weights.device)
    dropped = weights * local.part_of(F.dropout(ones, given.dropout_p), layout)
    mixed: Tensor = dropped @ given.values()
    return mixed
