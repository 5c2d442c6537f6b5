"""Optimizers that move each parameter on its own."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class PerParameter(Optimizer):
    """An optimizer that is told how one parameter moves."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step."""
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.move(parameter, parameter.grad, group)
        return result

    @abstractmethod
    def move(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        """Move a parameter by its gradient, with the options of its group; gradients are off."""
