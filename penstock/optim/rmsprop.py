"""RMSProp as TensorFlow has it."""

from typing import Any

import torch
from torch import Tensor

from .per_parameter import PerParameter


class RMSProp(PerParameter):
    """RMSProp with the epsilon under the root, as AmoebaNet was trained.

        square <- decay * square + (1 - decay) * grad ** 2         begins at 1
        buffer <- momentum * buffer + lr * grad / sqrt(square + eps)
        weight <- weight - buffer

    torch.optim.RMSprop differs in all three: it adds epsilon to the root, begins at 0, so that the
    first steps are large, and multiplies the buffer by the learning rate of now.  With an epsilon
    of 0.1 or 1, as the papers have it, these are other steps altogether.  Weight decay is added to
    the gradient.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        *,
        decay: float = 0.9,
        momentum: float = 0.9,
        eps: float = 0.1,
        weight_decay: float = 0.0,
    ) -> None:
        options = {"lr": lr, "decay": decay, "momentum": momentum, "eps": eps}
        super().__init__(params, {**options, "weight_decay": weight_decay})

    def move(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if "square" not in state:
            state["square"] = torch.ones_like(parameter)
            state["buffer"] = torch.zeros_like(parameter)
        if group["weight_decay"]:
            grad = grad.add(parameter, alpha=group["weight_decay"])
        square, buffer = state["square"], state["buffer"]
        square.mul_(group["decay"]).addcmul_(grad, grad, value=1 - group["decay"])
        root = square.add(group["eps"]).sqrt_()
        buffer.mul_(group["momentum"]).addcdiv_(grad, root, value=group["lr"])
        parameter.sub_(buffer)
