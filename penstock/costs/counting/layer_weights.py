"""Count the bytes of weights, gradients and optimizer state of each layer."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.costs.records import LayerWeights
from penstock.errors import ConfigError
from penstock.model.layers import Layers
from penstock.torch_private import TorchDispatchMode

from .classify import described

MakeOptimizer = Callable[[Any], torch.optim.Optimizer]
"""Makes an optimizer of a list of parameters, such as torch.optim.AdamW."""


def layer_weights(
    layers: Layers, optimizer: MakeOptimizer, gradient_dtype: str | None = None
) -> tuple[LayerWeights, ...]:
    """Count parameters, gradients and optimizer state; the first layer counts a shared parameter.

    Gradients have `gradient_dtype` where that is wider.  An optimizer that takes no step with
    parameters without values is a ConfigError.
    """
    seen: set[int] = set()
    known: dict[Any, _Optimized] = {}
    weights = []
    for step in layers:
        parameters = _new(step.module.parameters(), seen)
        trained = [p for p in parameters if p.requires_grad]
        optimized = [_optimized(p, optimizer, known) for p in trained]
        weights.append(
            LayerWeights(
                parameter_bytes=_bytes(parameters),
                gradient_bytes=gradient_bytes(trained, gradient_dtype),
                optimizer_bytes=sum(own.state_bytes for own in optimized),
                buffer_bytes=_bytes(_new(step.module.buffers(), seen)),
                update_bytes=sum(own.update_bytes for own in optimized),
            )
        )
    return tuple(weights)


def gradient_bytes(parameters: Iterable[Tensor], dtype: str | None) -> int:
    """Return the bytes of gradients in `dtype`, where that is wider than their parameters."""
    least = 0 if dtype is None else getattr(torch, dtype).itemsize
    return sum(p.numel() * max(least, p.element_size()) for p in parameters)


def _new(tensors: Any, seen: set[int]) -> list[Tensor]:
    new = [tensor for tensor in tensors if id(tensor) not in seen]
    seen.update(map(id, new))
    return new


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class _Optimized(NamedTuple):
    """What an optimizer keeps of a parameter, and moves in a step; 0 if a step asks for values."""

    state_bytes: int
    update_bytes: int


class _Moved(TorchDispatchMode):
    """Counts the bytes that operators read and write inside."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        operators = described(func, args, kwargs or {}, result)
        self.num_bytes += sum(operator.num_bytes for operator in operators)
        return result


def _optimized(parameter: Tensor, make: MakeOptimizer, known: dict[Any, _Optimized]) -> _Optimized:
    """Take two steps with a meta tensor in the parameter's place; the first one makes state."""
    key = tuple(parameter.shape), parameter.dtype
    if key not in known:
        twin = nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"))
        twin.grad = torch.empty_like(twin)
        optimizer, error, moved = make([twin]), "", _Moved()
        is_fused = any(group.get("fused") for group in optimizer.param_groups)
        for group in optimizer.param_groups if is_fused else ():
            group["fused"] = False  # no device, no kernel; it moves each tensor once each way
        try:
            optimizer.step()
            with moved:
                optimizer.step()
        except (NotImplementedError, RuntimeError) as failure:
            # a step that asks for values may have made its state before
            error = (str(failure).splitlines() or [type(failure).__name__])[0]
        state = [x for x in optimizer.state[twin].values() if isinstance(x, Tensor)]
        if error and not state:
            raise ConfigError(
                f"optimizer={type(optimizer).__name__} does not tell what it keeps of a parameter "
                f"without values ({error}). Give another one that keeps as much"
            )
        known[key] = _Optimized(_bytes(state), 0 if error or is_fused else moved.num_bytes)
    return known[key]
