"""Bring layers to their devices, or make them there if they were built on the meta device."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import ConfigError
from penstock.torch_private import (
    buffers_of,
    move_tensors,
    parameters_of,
    reset_of,
    unsaved_buffers_of,
    version_counter,
)

from .stage_plan import Step

Made = dict[int, tuple[Tensor, Tensor]]
"""(tensor on the meta device, what was made of it) by the id of the first one."""


Placed = Callable[[Sequence[Step]], None]
"""What is called with layers that share weights, once these are on their device."""


def move_or_make(
    step: Step,
    device: torch.device,
    seed: int,
    made: Made | None = None,
    *,
    draws: bool = True,
    later: bool = False,
) -> None:
    """Move a layer; one without values gets those that its own `reset_parameters` draw.

    What they draw depends on `seed` and the layer's number only, not on how the model is cut.
    Unless it `draws`, parameters and persistent buffers get memory only: a file has their values;
    with `later`, parameters get that from `give_rest`, if nothing is drawn in this layer.
    A tensor that `made` knows from another layer is the same one here.

    Raises:
        ConfigError: a module without values has no `reset_parameters` to give it some.
    """
    if not any(tensor.is_meta for tensor in tensors_of(step.module)):
        step.module.to(device)
        return
    needed = own_tensors if draws else unsaved_buffers
    owners = [m for m in step.module.modules() if any(t.is_meta for t in needed(m))]
    for owner in owners:
        if reset_of(owner) is None or not all(t.is_meta for t in own_tensors(owner)):
            raise _cannot_make(step, owner)
    later = later and not draws and not owners
    move_values(step.module, device)
    _give_memory(step.module, device, {} if made is None else made, later=later)
    versions = {tensor: version_counter(tensor) for owner in owners for tensor in needed(owner)}
    with forked_random([device]):
        torch.manual_seed(_init_key(seed, step.index))
        for owner in reversed(owners):  # a parent may refine its children
            reset = reset_of(owner)
            assert reset is not None
            reset()
    for owner in owners:
        if any(versions.get(tensor) == version_counter(tensor) for tensor in needed(owner)):
            raise _cannot_make(step, owner)


def move_values(module: nn.Module, device: torch.device) -> None:
    """Move what has values."""
    move_tensors(module, lambda tensor: tensor if tensor.is_meta else tensor.to(device))


def _give_memory(module: nn.Module, device: torch.device, made: Made, *, later: bool) -> None:
    """Put tensors with memory where there are such on the meta device."""
    both: Iterable[dict[str, Any]] = chain.from_iterable(
        (parameters_of(part), buffers_of(part)) for part in module.modules()
    )
    for places in both:
        for name, tensor in places.items():
            if tensor is not None and tensor.is_meta:
                places[name] = with_memory(tensor, device, made, later=later)


def with_memory(
    tensor: Tensor, device: torch.device, made: Made, *, later: bool = False
) -> Tensor:
    """Return a tensor like one on the meta device, with memory, but no values yet.

    It is the same one for a tensor that has several places.  A parameter that gets memory `later`
    has its shape, and one number for all of its elements.
    """
    if id(tensor) not in made:
        if later and isinstance(tensor, nn.Parameter) and tensor.is_contiguous():
            new = torch.empty((), dtype=tensor.dtype, device=device).expand(tensor.shape)
        else:
            new = torch.empty_like(tensor, device=device, requires_grad=False)
        if isinstance(tensor, nn.Parameter):
            new = nn.Parameter(new, requires_grad=tensor.requires_grad)
        new.__dict__.update(tensor.__dict__)  # what libraries note on it
        new.__dict__.pop("_is_hf_initialized", None)  # transformers would not fill it
        made[id(tensor)] = tensor, new
    return made[id(tensor)][1]


def has_memory(tensor: Tensor) -> bool:
    """Tell whether each element has memory of its own."""
    return tensor.untyped_storage().nbytes() >= tensor.nbytes


def give_rest(steps: Iterable[Step]) -> None:
    """Give memory to the parameters of layers that were to get it later."""
    for parameter in (p for step in steps for p in step.module.parameters() if not p.is_meta):
        if not has_memory(parameter):
            parameter.data = torch.empty_like(parameter, memory_format=torch.contiguous_format)


def tied_groups(steps: Iterable[Step]) -> list[list[Step]]:
    """Put layers together that share parameters; most are alone."""
    groups: list[tuple[set[int], list[Step]]] = []
    for step in steps:
        ids = set(map(id, step.module.parameters()))
        tied = [group for group in groups if group[0] & ids]
        groups = [group for group in groups if not group[0] & ids]
        together = [*chain.from_iterable(own for _, own in tied), step]
        groups.append((ids.union(*(known for known, _ in tied)), together))
    return [own for _, own in groups]


def forked_random(devices: Iterable[torch.device]) -> AbstractContextManager[None]:
    """Leave the random states of the CPU and of `devices` as they were."""
    return torch.random.fork_rng([device.index for device in devices if device.type == "cuda"])


def own_tensors(module: nn.Module) -> list[Tensor]:
    """Return the parameters and buffers of a module itself."""
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]


def unsaved_buffers(module: nn.Module) -> list[Tensor]:
    """Return the buffers of a module itself that no state dict holds."""
    found = (buffers_of(module).get(name) for name in unsaved_buffers_of(module))
    return [buffer for buffer in found if buffer is not None]


def may_be_absent(original: nn.Module) -> Callable[[str], bool]:
    """Tell which names the model's class leaves out of the files that it saves, or may lack.

    Their values are fixed: the model's own code gives them, as to a new model.
    """
    kinds = ("_keys_to_ignore_on_save", "_keys_to_ignore_on_load_missing")
    patterns = [re.compile(p) for kind in kinds for p in getattr(original, kind, None) or ()]
    return lambda name: any(pattern.search(name) for pattern in patterns)


def _cannot_make(step: Step, module: nn.Module) -> ConfigError:
    return ConfigError(
        f"layer {step.label} was built on the meta device, and its {type(module).__name__} has no "
        "reset_parameters() that gives all of its parameters and buffers values. Add that method, "
        "or build the layer on a real device"
    )


def _init_key(seed: int, layer: int) -> int:
    return (seed * 0x9E3779B97F4A7C15 + layer * 0xBF58476D1CE4E5B9) & (2**63 - 1)


def tensors_of(module: nn.Module) -> Iterator[Tensor]:
    """Yield the parameters and buffers of a module and those inside it."""
    return chain(module.parameters(), module.buffers())
