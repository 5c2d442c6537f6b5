"""Find the loss that a model computes itself from labels among its inputs."""

from collections.abc import Mapping
from numbers import Real
from typing import Any

import numpy
from torch import Tensor

from penstock.errors import ConfigError

from .batch import undeclared

COUNTS = ("num_items_in_batch", "num_items")
"""Names of the input by which a model divides its loss: the count of the whole batch."""


def output_loss(output: Any, target: Any = None) -> Tensor:
    """Return the scalar `loss` in a model's output, or one that comes first; else ConfigError."""
    loss = loss_in(output)
    if loss is None:
        first = output[0] if isinstance(output, tuple | list) and output else output
        if isinstance(first, Tensor) and first.dim() == 0:
            return first
        holds = f" of {', '.join(map(str, output))}" if isinstance(output, Mapping) else ""
        raise ConfigError(
            f"the model's output, a {type(output).__name__}{holds}, has no loss. Give the labels "
            "that it computes one from with the inputs (train_step({..., 'labels': ...})), or "
            "Pipeline(..., loss=...)"
        )
    return loss


def loss_in(output: Any) -> Tensor | None:
    """Return the scalar called `loss` in a model's output; None if there is none."""
    named = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    return named if isinstance(named, Tensor) and named.dim() == 0 else None


def counted_in(inputs: Any) -> float:
    """Return the input by which a model divides its loss; -1 if there is none.

    The loss of a micro-batch is then a term of the whole batch's, and these terms are summed.
    """
    if not isinstance(inputs, Mapping):
        return -1.0
    for name in COUNTS:
        value = undeclared(inputs.get(name))
        is_number = isinstance(value, Real) and not isinstance(value, bool)
        if is_number or (isinstance(value, Tensor | numpy.ndarray) and value.ndim == 0):
            return float(value)
    return -1.0
