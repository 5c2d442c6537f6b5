"""Let meta tensors take the kernels that torch would choose on another type of device.

On the meta device torch puts attention and dropout together from small operators.  A GPU has one
kernel for each, which saves less; the CPU has one for attention without dropout.
"""

from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_FLASH = "_scaled_dot_product_flash_attention"
_EFFICIENT = "_scaled_dot_product_efficient_attention"
_OF_CPU = "_scaled_dot_product_flash_attention_for_cpu"
"""Operators of torch by their names; one that it lacks is put together from small ones."""
_DROPOUT = (F.dropout, torch.dropout)
_PLAIN = (Tensor, nn.Parameter)
_HALF = (torch.float16, torch.bfloat16)
_ATTENTION = F.scaled_dot_product_attention


def _looked_into(function: Any) -> Any:
    """Return a function of torch that tells a mode of what it calls, and not of itself.

    While a mode is told of a function it is off, so the attention inside goes by unseen.
    """
    seen_by_nobody = {"has_torch_function": lambda tensors: False}
    code, names = function.__code__, function.__globals__ | seen_by_nobody
    found = FunctionType(code, names, function.__name__, function.__defaults__)
    found.__kwdefaults__ = function.__kwdefaults__
    return found


_LOOKED_INTO = _looked_into(F.multi_head_attention_forward)


class Kernels(TorchFunctionMode):
    """Runs attention and dropout as on devices of `torch_type`: "cuda", "cpu", or as put together
    from small operators on all others.
    """

    def __init__(self, torch_type: str) -> None:
        super().__init__()
        self._torch_type = torch_type

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if all(kind in _PLAIN for kind in types):
            result = None
            if func is _ATTENTION:
                result = self._attention(*args, **kwargs)
            elif func is F.multi_head_attention_forward:
                with self:
                    return _LOOKED_INTO(*args, **kwargs)
            elif func in _DROPOUT and self._torch_type == "cuda":
                result = _dropout(*args, **kwargs)
            if result is not None:
                return result
        return func(*args, **kwargs)

    def _attention(  # noqa: PLR0913 - as torch's own
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        """Run one kernel; None where there is none for such arguments."""
        if enable_gqa or not _are_alike(query, key, value):
            return None
        kernel = self._kernel(query, attn_mask, dropout_p)
        operator = getattr(torch.ops.aten, kernel, None) if kernel else None
        if operator is None:
            return None
        if kernel == _FLASH:
            return operator(query, key, value, dropout_p, is_causal, scale=scale)[0]
        bias = _as_numbers(attn_mask, query)
        if kernel == _OF_CPU:
            return operator(query, key, value, 0.0, is_causal, attn_mask=bias, scale=scale)[0]
        if bias is not None:
            bias = bias.expand(*query.shape[:3], key.shape[2])
        return operator(query, key, value, bias, True, dropout_p, is_causal, scale=scale)[0]

    def _kernel(self, query: Tensor, mask: Tensor | None, dropout_p: float) -> str:
        """Name the operator that torch chooses on the device; "" where it chooses none."""
        if self._torch_type == "cuda":
            return _FLASH if query.dtype in _HALF and mask is None else _EFFICIENT
        learned = mask is not None and mask.requires_grad
        return _OF_CPU if self._torch_type == "cpu" and not dropout_p and not learned else ""


def _are_alike(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Tell whether these are of the usual form: (B, H, T, C), of one width and dtype."""
    tensors = (query, key, value)
    return all(
        t.dim() == 4 and t.dtype is query.dtype and t.shape[-1] == query.shape[-1] for t in tensors
    )


def _as_numbers(mask: Tensor | None, like: Tensor) -> Tensor | None:
    """Return what is added to scores: a mask of truth values is made numbers first."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill_(~mask, float("-inf"))


def _dropout(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor | None:
    if not training or inplace or not 0 < p < 1:
        return None
    dropped: Tensor = torch.native_dropout(input, p, training)[0]
    return dropped
