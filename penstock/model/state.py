"""What modules keep beside their parameters: buffers, tensors as attributes, and modes."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from penstock.torch_private import buffers_of

from .pytree import Sealed

Place = tuple[nn.Module, bool, str]
"""(module, whether it is a buffer and no plain attribute, name): where a module keeps a tensor."""

ABSENT = object()
"""Stands for a tensor that is not there."""


def attributes(modules: Iterable[nn.Module]) -> list[Place]:
    """Find the tensors that are plain attributes of the given modules, and have values."""
    return [
        (module, False, name)
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, Tensor) and not isinstance(value, Sealed)
    ]


def first_names(named: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """Return, by each of its names, the first name of the same tensor."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in named}


def read_state(
    modules: Iterable[nn.Module], places: Iterable[Place]
) -> dict[Place, Tensor | None]:
    """Return all buffers of `modules`, and what stands at `places`; None where no tensor does."""
    now: dict[Place, Tensor | None] = {
        (m, True, name): buffer for m in modules for name, buffer in buffers_of(m).items()
    }
    for place in places:
        value = standing_at(place)
        now[place] = value if isinstance(value, Tensor) else None
    return now


def holder(place: Place) -> dict[str, Any]:
    """Return the dictionary in which the module keeps the tensor."""
    module, is_buffer, _ = place
    return buffers_of(module) if is_buffer else vars(module)


def standing_at(place: Place) -> Any:
    """Return what stands at a place, or `ABSENT`."""
    held = holder(place)
    is_there = place[2] in held  # the buffers of a scripted module have no `get`
    return held[place[2]] if is_there else ABSENT


def put_state(state: Mapping[Place, Any]) -> None:
    """Put tensors where they were, and take away what was `ABSENT`."""
    for place, tensor in state.items():
        if tensor is ABSENT:
            holder(place).pop(place[2], None)
        else:
            holder(place)[place[2]] = tensor


def tensors_at(places: Iterable[Place]) -> list[Tensor]:
    """Return what stands at places where tensors do."""
    return [holder(place)[place[2]] for place in places]


@contextmanager
def in_evaluation(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Have modules in evaluation mode; each is in its own mode afterwards."""
    before = [(module, module.training) for module in modules]
    for module, _ in before:
        module.training = False
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


@contextmanager
def keeping_values(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Restore the values of tensors afterwards."""
    before = [(tensor, tensor.detach().clone()) for tensor in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in before:
                tensor.copy_(value)
