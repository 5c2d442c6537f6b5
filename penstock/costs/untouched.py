"""Run layers that are only measured: modules, parameters and random numbers are as before."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from penstock.model.state import ABSENT, attributes, keeping_values, put_state, read_state
from penstock.torch_private import NEVER_COMPUTES, gradient_hooks, saving_hooks


@contextmanager
def untouched(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Put buffers, tensor attributes and random number generators back to what they were."""
    owners = list(dict.fromkeys(owner for module in modules for owner in module.modules()))
    before = read_state(owners, attributes(owners))
    devices = list(range(torch.cuda.device_count()))
    with keeping_values(tensor for tensor in before.values() if tensor is not None):
        try:
            with torch.random.fork_rng(devices=devices), torch.enable_grad(), _saving_as_usual():
                yield
        finally:
            after = read_state(owners, attributes(owners))
            put_state({place: before.get(place, ABSENT) for place in after.keys() | before.keys()})


def _saving_as_usual() -> AbstractContextManager[Any]:
    """Set hooks aside that would change what autograd saves: the caller may be in a checkpoint."""
    if saving_hooks() is None:
        return nullcontext()
    return saved_tensors_hooks(as_it_is, as_it_is)


def as_it_is(tensor: Tensor) -> Tensor:
    """Unpack what was saved as it is."""
    return tensor


setattr(as_it_is, NEVER_COMPUTES, True)


@contextmanager
def untouched_gradients(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Take the hooks of parameters off; put back afterwards these, gradients and attributes.

    A function's own backward may add to `.grad`, or to a tensor that is an attribute of the
    parameter (`main_grad`): both have their values back.
    """
    parameters = list(parameters)
    gradients = [parameter.grad for parameter in parameters]
    attributes = [dict(vars(parameter)) for parameter in parameters]
    hooks = [(found, dict(found)) for p in parameters for found in gradient_hooks(p) if found]
    values = [value for held in attributes for value in held.values() if isinstance(value, Tensor)]
    with keeping_values([*values, *(g for g in gradients if g is not None)]):
        try:
            for found, _ in hooks:
                found.clear()
            yield
        finally:
            for found, before in hooks:
                found.update(before)
            for parameter, gradient, held in zip(parameters, gradients, attributes, strict=True):
                parameter.grad = gradient
                _put(vars(parameter), held)


def _put(held: dict[str, Any], before: dict[str, Any]) -> None:
    """Put attributes back where any was added, taken away or replaced."""
    if held.keys() != before.keys() or any(held[name] is not before[name] for name in held):
        held.clear()
        held.update(before)
