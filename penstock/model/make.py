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
    owners = [m for m in step.module.modules() if any(t.is_meta for t in _own(m))]
    for owner in owners:
        if _reset(owner) is None or not all(t.is_meta for t in _own(owner)):
            raise _cannot_make(step, owner)
    step.module._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t.to(device))
    versions = {tensor: tensor._version for owner in owners for tensor in _own(owner)}
    with torch.random.fork_rng(devices=[device.index] if device.type == "cuda" else []):
        torch.manual_seed(_init_key(seed, step.index))
        for owner in reversed(owners):  # a parent may refine its children
            reset = _reset(owner)
            assert reset is not None
            reset()
    for owner in owners:
        if any(versions.get(tensor) == tensor._version for tensor in _own(owner)):
            raise _cannot_make(step, owner)


def _own(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]


def _cannot_make(step: Step, module: nn.Module) -> ConfigError:
    return ConfigError(
        f"layer {step.label} was built on the meta device, and its {type(module).__name__} has no "
        "reset_parameters() that gives all of its parameters and buffers values. Add that method, "
        "or build the layer on a real device"
    )


def _reset(module: nn.Module) -> Callable[[], None] | None:
    """Give what torch's own modules draw their initial values with."""
    return getattr(module, "reset_parameters", getattr(module, "_reset_parameters", None))


def _init_key(seed: int, layer: int) -> int:
    return (seed * 0x9E3779B97F4A7C15 + layer * 0xBF58476D1CE4E5B9) & (2**63 - 1)


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    return chain(module.parameters(), module.buffers())
