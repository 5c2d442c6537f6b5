"""Optimizers that torch lacks: TensorFlow's RMSProp, and Adafactor with a free learning rate."""

import math
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class PerParameter(Optimizer):
    """An optimizer whose subclasses update one parameter at a time."""

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
        """Update a parameter by its gradient and the options of its group, under `no_grad`."""


class RMSProp(PerParameter):
    """RMSProp with the epsilon under the root, as AmoebaNet was trained.

        square <- decay * square + (1 - decay) * grad ** 2         begins at 1
        buffer <- momentum * buffer + lr * grad / sqrt(square + eps)
        weight <- weight - buffer

    torch.optim.RMSprop differs in all three lines: it adds epsilon to the root, begins at 0, so
    that the first steps are large, and multiplies the buffer by the current learning rate.  With
    the papers' epsilon of 0.1 or 1 its steps are quite different.  Weight decay is added to the
    gradient.
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


class Adafactor(PerParameter):
    """Adafactor (Shazeer and Stern 2018, algorithms 4 and 5).

    It keeps the mean of a matrix's squared gradients by row and by column only.

        square <- b * square + (1 - b) * (grad ** 2 + 1e-30)    b = 1 - step ** beta2_decay
        update <- grad / sqrt(square)
        update <- update / max(1, rms(update) / clip)
        weight <- weight - lr * max(1e-3, rms(weight)) * update

    torch.optim.Adafactor caps its learning rate at 1 / sqrt(step), which overrides a schedule of
    the user.  There is no momentum.  Tensors of more than two dimensions are factored over the
    last two.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        *,
        beta2_decay: float = -0.8,
        clip: float = 1.0,
        weight_decay: float = 0.0,
    ) -> None:
        options = {"lr": lr, "beta2_decay": beta2_decay, "clip": clip}
        super().__init__(params, {**options, "weight_decay": weight_decay})

    def move(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        state["step"] = state.get("step", 0) + 1
        share = state["step"] ** group["beta2_decay"]  # 1 in the first step
        # Divide by the root of the second moments; a matrix has one for each row and column.
        square = grad.square().add_(_LEAST_SQUARE)
        if parameter.dim() < 2:
            update = grad * _mean(state, "square", square, share).rsqrt()
        else:
            rows = _mean(state, "rows", square.mean(dim=-1), share)
            columns = _mean(state, "columns", square.mean(dim=-2), share)
            of_rows = (rows / rows.mean(dim=-1, keepdim=True)).rsqrt_().unsqueeze(-1)
            update = grad * of_rows * columns.rsqrt().unsqueeze(-2)
        # Clip the update, then scale it by the size of the weight.
        update.div_(max(1.0, _size(update) / group["clip"]))
        length = group["lr"] * max(_LEAST_SIZE, _size(parameter))
        if group["weight_decay"]:
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.sub_(update, alpha=length)


_LEAST_SQUARE = 1e-30
"""Added to squared gradients."""
_LEAST_SIZE = 1e-3
"""Least root mean square of a weight that scales its step."""


def _mean(state: dict[str, Any], key: str, value: Tensor, share: float) -> Tensor:
    """Move a running mean by `share` of the way to a value."""
    if key not in state:
        state[key] = torch.zeros_like(value)
    mean: Tensor = state[key]
    return mean.lerp_(value, share)


def _size(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor)) / math.sqrt(max(1, tensor.numel()))
