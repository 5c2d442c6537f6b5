"""Bring a layer to its device, or make it there if it was built on the meta device."""

from collections.abc import Callable, Iterator
from itertools import chain

import torch
from torch import Tensor, nn

from penstock.errors import ConfigError

from .layers import Step


def move_or_make(step: Step, device: torch.device, seed: int) -> None:
    """Move a layer; one without values gets those that its own `reset_parameters` draw.

    What they draw depends on `seed` and the layer's number only, not on how the model is cut.

    Raises:
        ConfigError: a module without values has no `reset_parameters` to give it some.
    """
    if not any(tensor.is_meta for tensor in _tensors(step.module)):
        step.module.to(device)
        return
    for module in step.module.modules():
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if any(tensor.is_meta for tensor in own) and _reset(module) is None:
            raise ConfigError(
                f"layer {step.label} was built on the meta device, and its "
                f"{type(module).__name__} has no reset_parameters() to give its tensors values. "
                "Add that method, or build the layer on a real device"
            )
    step.module.to_empty(device=device)
    with torch.random.fork_rng(devices=[device.index] if device.type == "cuda" else []):
        torch.manual_seed(_init_key(seed, step.index))
        for module in reversed(list(step.module.modules())):  # a parent may refine its children
            reset = _reset(module)
            if reset is not None:
                reset()


def _reset(module: nn.Module) -> Callable[[], None] | None:
    """Give what torch's own modules draw their initial values with."""
    return getattr(module, "reset_parameters", getattr(module, "_reset_parameters", None))


def empty(module: nn.Module) -> None:
    """Give back the memory of a layer that runs elsewhere; its shapes stay."""
    module.to("meta")


def _init_key(seed: int, layer: int) -> int:
    return (seed * 0x9E3779B97F4A7C15 + layer * 0xBF58476D1CE4E5B9) & (2**63 - 1)


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    return chain(module.parameters(), module.buffers())
