"""Run functions of torch on shards, if they need more than a call on the shards.

A kernel gets the function, its arguments as shards, and a `Local` with the slices' places in the
whole.  Most functions need no kernel: they run on shards directly.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from penstock.costs.counting.opaque_modules import OPAQUE
from penstock.sharding.layouts import Layout, S, Shape
from penstock.sharding.letters import base_name

from . import kernels_vision
from .sizes import Function, Kernel, Local, slice_here


def _opaque(func: Function, args: Any, kwargs: Any, local: Local) -> Tensor:
    """Call an opaque module with the starts of its arguments' slices."""
    starts = {
        letter: local.start(layout, dim)
        for letters, layout in zip(OPAQUE[func.__name__].letters, local.sized.takes, strict=False)
        for dim, letter in enumerate(letters)
    }
    return func(*args, **kwargs, starts=starts)


RESHAPES = ("view", "reshape", "flatten", "unflatten")
"""Functions that merge or split dimensions."""
_MADE = ("new_zeros", "new_ones", "new_full", "new_empty")
SHAPED = (*RESHAPES, *_MADE, "expand", "broadcast_to", "repeat_interleave")
"""Functions whose results have other lengths than their arguments."""


def shapes_given(
    name: str, how: tuple[Any, Any, Any], arguments: Sequence[Any]
) -> tuple[Shape, ...] | None:
    """Return the shapes of the whole results of a function in `SHAPED`; None for others."""
    if name not in SHAPED:
        return None
    func, (_, *rest), kwargs = how
    asked = tuple(tuple(x) if isinstance(x, list | tuple) else x for x in rest)
    return (_reshaped(func, arguments[0].whole_shape, asked, tuple(kwargs.items())),)


@lru_cache(maxsize=4096)
def _reshaped(func: Any, shape: Shape, asked: Any, options: Any) -> Shape:
    whole: Tensor = func(torch.empty(shape, device="meta"), *asked, **dict(options))
    return tuple(whole.shape)


def _reshape(func: Function, args: Any, kwargs: Any, local: Local) -> Tensor:
    """Reshape or expand to this device's part of the new shape."""
    tensor, shape = args[0], _shape_asked(local)
    is_expansion = base_name(func.__name__) in ("expand", "broadcast_to")
    result: Tensor = tensor.expand(shape) if is_expansion else tensor.reshape(shape)
    return result


def _make(func: Function, args: Any, kwargs: Any, local: Local) -> Tensor:
    """Make this device's part; of positional arguments only the value is no length."""
    value = args[2:] if base_name(func.__name__) == "new_full" else ()
    options = {key: value for key, value in kwargs.items() if key != "size"}
    return func(args[0], _shape_asked(local), *value, **options)


def _shape_asked(local: Local) -> tuple[int, ...]:
    assert local.sized.shapes is not None
    return slice_here(local.sized.shapes[0], local.sized.gives[0], local.axes).lengths


def _dropout(func: Function, args: Any, kwargs: Any, local: Local) -> Tensor:
    """Draw the mask of the whole tensor, so that the numbers are those of one device."""
    (layout,) = local.sized.takes
    tensor, *rest = args
    options = {**dict(zip(("p", "training"), rest, strict=False)), **kwargs}
    drops = options.get("p", 0.5) > 0 and options.get("training", True)
    if not drops or not any(isinstance(state, S) for state in layout):
        return func(*args, **kwargs)
    mask = _dropout_mask(tensor, layout, local, *rest, **kwargs)
    masked: Tensor = tensor * mask.clone()  # a view would keep the whole for the backward
    return masked


def _dropout_mask(like: Tensor, layout: Layout, local: Local, *rest: Any, **kwargs: Any) -> Tensor:
    """Return this device's part of a mask, which all draw whole: their generators stay in step."""
    whole = local.whole_shape(like.shape, layout)
    ones = torch.ones(whole, dtype=like.dtype, device=like.device)
    return local.part_of(F.dropout(ones, *rest, **kwargs), layout)


def _make_like(func: Function, args: Any, kwargs: Any, local: Local) -> Tensor:
    """Draw random numbers for the whole tensor, as dropout does."""
    (tensor, *rest), (layout,) = args, local.sized.takes
    if not func.__name__.startswith("rand") or not any(isinstance(x, S) for x in layout):
        return func(*args, **kwargs)
    whole = tensor.new_empty(local.whole_shape(tensor.shape, layout))
    return local.part_of(func(whole, *rest, **kwargs), layout).clone()


# -- attention ------------------------------------------------------------------------------------


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


def _causal(query: Tensor, key: Tensor, end: int, *, fused: bool) -> Tensor:
    """Return the mask of a causal attention for the last queries of `end`.

    With `fused` a GPU's fused kernel knows the mask without its values.
    """
    lengths = query.shape[-2], key.shape[-2]
    if fused and query.is_cuda and lengths[1] == end:
        return causal_lower_right(*lengths)
    return torch.ones(lengths, dtype=torch.bool, device=query.device).tril(end - lengths[0])


def _attention(func: Function, args: Any, kwargs: Any, local: Local) -> Tensor:
    """Attend from a slice of the queries, or of sequences and heads.

    Queries of a causal mask attend to the keys up to the last of them.  The dropout mask is drawn
    for all heads and queries, so that the numbers are those of one device.
    """
    given, (layout,) = _Attention(*args, **kwargs), local.sized.gives
    query, key, value, allowed, dropout_p, is_causal, scale, gqa = given
    row = query.dim() - 2
    if is_causal and local.is_cut(layout, row):
        end = local.start(layout, row) + query.shape[-2]
        if not dropout_p:
            key, value = key[..., :end, :], value[..., :end, :]
        allowed, is_causal = _causal(query, key, end, fused=not (dropout_p or gqa)), False
    if not dropout_p or not any(isinstance(state, S) for state in layout):
        its = query, key, value, allowed, dropout_p, is_causal
        result: Tensor = func(*its, scale=scale, enable_gqa=gqa)
        return result
    # 1. Repeat keys and values for the query heads that share them.
    if gqa and key.shape[-3] != query.shape[-3]:
        times = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(times, -3), value.repeat_interleave(times, -3)
    # 2. Compute the scores as torch does without a fused kernel, and add the mask as 0 and -inf.
    # Both factors are scaled by the root: the product of half-precision numbers stays small.
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    half = abs(scale) ** 0.5
    scores = (query * (-half if scale < 0 else half)) @ (key.transpose(-2, -1) * half)
    if is_causal:
        allowed = _causal(query, key, query.shape[-2], fused=False)
    if allowed is not None and allowed.dtype is torch.bool:
        zeros = torch.zeros_like(allowed, dtype=query.dtype)
        allowed = zeros.masked_fill(~allowed, float("-inf"))
    scores = scores if allowed is None else scores + allowed
    # 3. A query that may attend to no key gets weights of 0 and gradients of 0, not NaN.
    no_key = (scores == float("-inf")).all(-1, keepdim=True)
    weights = scores.masked_fill(no_key, 0.0).softmax(-1).masked_fill(no_key, 0.0)
    # 4. Drop weights by this device's part of the whole mask.
    mixed: Tensor = weights * _dropout_mask(weights, layout, local, dropout_p) @ value
    return mixed


KERNELS: dict[str, Kernel] = {
    **dict.fromkeys((*RESHAPES, "expand", "broadcast_to"), _reshape),
    **dict.fromkeys(_MADE, _make),
    "dropout": _dropout,
    "made_like": _make_like,
    "scaled_dot_product_attention": _attention,
    **kernels_vision.KERNELS,
}
"""The kernel of each function that has one, by its base name."""


def kernel_of(function: str) -> Kernel | None:
    """Return the kernel of a function or of an opaque module, by its full name."""
    return _opaque if function in OPAQUE else KERNELS.get(base_name(function))
