"""State of modules beside their parameters: buffers, tensors as attributes, and modes; and what a
process has of a model: tensors by their names, and modules with extra state.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from penstock.torch_private import buffers_of

from .extra_state import Owners, find_owners, without_extra
from .owned import LOSS
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


@dataclass(frozen=True, slots=True)
class Held:
    """The tensors of `module`, and extra state of the modules of `original` but for those
    `elsewhere`.

    `original` is the model, whose class may know of other names; `loss` is the pipeline's, and
    `names` are those of all parameters in the model's order.  Where this process has only a part
    (`is_part`), tensors without memory are those of other processes.
    """

    module: nn.Module
    original: nn.Module
    elsewhere: tuple[str, ...] = ()
    is_part: bool = False
    loss: Any = None
    names: Sequence[str] = ()

    def is_of_loss(self, name: str) -> bool:
        """Tell whether a name of a tensor is that of the pipeline's loss, which no model has."""
        child = dict(self.original.named_children()).get(LOSS)
        return name.startswith(f"{LOSS}.") and (child is None or child is self.loss)

    @property
    def owners(self) -> Owners:
        """The modules with extra state that this process runs."""
        return find_owners(self.original, self.elsewhere)

    def state(self, *, keep_vars: bool = False) -> dict[str, Any]:
        """Return the state dict without extra state, and without tensors of other processes."""
        state = without_extra(self.module.state_dict(keep_vars=keep_vars), self.original)
        if not self.is_part:
            return state
        return {n: v for n, v in state.items() if not (isinstance(v, Tensor) and v.is_meta)}

    def own_tensors(self) -> dict[tuple[str, ...], Tensor]:
        """Return the tensors of `state` but for the loss's, each by all its names."""
        names: dict[int, list[str]] = {}
        state = self.state(keep_vars=True)
        own = {
            name: value
            for name, value in state.items()
            if isinstance(value, Tensor) and not self.is_of_loss(name)
        }
        for name, tensor in own.items():
            names.setdefault(id(tensor), []).append(name)
        return {tuple(alike): own[alike[0]] for alike in names.values()}
