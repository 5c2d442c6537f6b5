"""Add gradients of low-precision parameters in a wider dtype, by torch's `Tensor.grad_dtype`.

    micro-batch i    backward of bf16 operators ──► bf16 gradient ──► cast ──► += .grad (fp32)

Autograd casts each gradient where it reaches the leaf, and adds in the wider dtype.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from penstock.errors import ConfigError


def name_of_dtype(dtype: Any) -> str | None:
    """Return the name of a dtype as plans have it, such as "float32"; None stays None."""
    return None if dtype is None else str(dtype).removeprefix("torch.")


def check_gradient_dtype(name: str | None) -> None:
    """Raise ConfigError unless `name` is None or a dtype of 32 or 64 bits."""
    if name not in (None, "float32", "float64"):
        raise ConfigError(
            f"gradient_dtype={name!r}; give torch.float32 or torch.float64, in which gradients of "
            "parameters of lower precision add up, or leave it out to add them in the dtype of "
            "each parameter"
        )


def widen_gradients(leaves: Iterable[Tensor], name: str | None) -> None:
    """Let the gradients of leaves have the dtype `name`, if their own has fewer bytes.

    A gradient that is there already is converted.  None changes nothing.
    """
    if name is None:
        return
    dtype: torch.dtype = getattr(torch, name)
    for leaf in leaves:
        is_narrow = leaf.is_floating_point() and leaf.element_size() < dtype.itemsize
        if is_narrow and leaf.grad_dtype is not dtype:
            gradient, leaf.grad = leaf.grad, None  # torch refuses two dtypes at once
            leaf.grad_dtype = dtype
            leaf.grad = None if gradient is None else gradient.to(dtype)
