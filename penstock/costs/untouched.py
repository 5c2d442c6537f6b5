"""Run a backward that is only measured: parameters are as before, and their hooks do not know."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from penstock.model.state import keeping_values
from penstock.torch_private import gradient_hooks


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
