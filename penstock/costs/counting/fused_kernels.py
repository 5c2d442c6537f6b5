"""Run meta tensors by the kernels that torch would choose on another type of device.

On the meta device torch puts attention and dropout together from small operators.  A GPU has one
kernel for each, which saves less; the CPU has one for attention without dropout.
"""

from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_FLASH = "_scaled_dot_product_flash_attention"
_EFFICIENT = "_scaled_dot_product_efficient_attention"
_OF_CPU = "_scaled_dot_product_flash_attention_for_cpu"
"""Operators of torch by their names; one that it lacks is put together from small ones."""
_DROPOUT = (F.dropout, torch.dropout)
_HALF = (torch.float16, torch.bfloat16)
_ATTENTION = F.scaled_dot_product_attention


def _looked_into(function: Any) -> Any:
    """Return a function of torch that shows a mode its inner calls, and not itself.

    A mode is off while it handles a function, so it would miss the attention inside.
    """
    seen_by_nobody = {"has_torch_function": lambda tensors: False}
    code, names = function.__code__, function.__globals__ | seen_by_nobody
    copy = FunctionType(code, names, function.__name__, function.__defaults__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


LOOKED_INTO = _looked_into(F.multi_head_attention_forward)


def run_as_on(torch_type: str, function: Any, args: Any, kwargs: Any) -> Any:
    """Run a function of torch as on devices of `torch_type`.

    On "cuda" and "cpu" attention and dropout are one kernel, on others many small operators.
    """
    result = None
    if function is _ATTENTION:
        result = _attention(torch_type, *args, **kwargs)
    elif function in _DROPOUT and torch_type == "cuda":
        result = _dropout(*args, **kwargs)
    return function(*args, **kwargs) if result is None else result


def _attention(  # noqa: PLR0913 - as torch's own
    torch_type: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Run one kernel; return None if there is none for such arguments."""
    # 1. Find the kernel; there is one for usual arguments only.
    usual = all(  # (B, H, T, C), of one width and dtype
        t.dim() == 4 and t.dtype is query.dtype and t.shape[-1] == query.shape[-1]
        for t in (query, key, value)
    )
    if not usual:
        return None
    kernel = _kernel_on(torch_type, query, attn_mask, dropout_p)
    if enable_gqa and kernel != _FLASH:  # the others want as many heads of keys as of queries
        return None
    operator = getattr(torch.ops.aten, kernel, None) if kernel else None
    if operator is None:
        return None
    # 2. Call it as torch does: each kernel takes the mask in another form.
    if kernel == _FLASH:
        return operator(query, key, value, dropout_p, is_causal, scale=scale)[0]
    bias = _as_numbers(attn_mask, query)
    if kernel == _OF_CPU:
        return operator(query, key, value, 0.0, is_causal, attn_mask=bias, scale=scale)[0]
    if bias is not None:
        bias = bias.expand(*query.shape[:3], key.shape[2])
    return operator(query, key, value, bias, True, dropout_p, is_causal, scale=scale)[0]


def _kernel_on(torch_type: str, query: Tensor, mask: Tensor | None, dropout_p: float) -> str:
    """Return the operator that torch chooses on the device; "" if it chooses none."""
    if torch_type == "cuda":
        return _FLASH if query.dtype in _HALF and mask is None else _EFFICIENT
    learned = mask is not None and mask.requires_grad
    return _OF_CPU if torch_type == "cpu" and not dropout_p and not learned else ""


def _as_numbers(mask: Tensor | None, like: Tensor) -> Tensor | None:
    """Return the numbers that a mask adds to scores."""
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
