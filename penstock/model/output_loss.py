"""The loss that a model computes itself, from labels among its inputs."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from penstock.errors import ConfigError


def output_loss(output: Any, target: Any = None) -> Tensor:
    """Return the loss in a model's output: what is called `loss`, or a scalar that comes first.

    Raises:
        ConfigError: there is none.
    """
    found = loss_in(output)
    if found is None:
        first = output[0] if isinstance(output, tuple | list) and output else output
        if isinstance(first, Tensor) and first.dim() == 0:
            return first
        holds = f" of {', '.join(map(str, output))}" if isinstance(output, Mapping) else ""
        raise ConfigError(
            f"the model's output, a {type(output).__name__}{holds}, has no loss. Give the labels "
            "that it computes one from with the inputs (train_step({..., 'labels': ...})), or "
            "Pipeline(..., loss=...)"
        )
    return found


def loss_in(output: Any) -> Tensor | None:
    """Return the scalar called `loss` in a model's output; None if there is none."""
    named = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    return named if isinstance(named, Tensor) and named.dim() == 0 else None
