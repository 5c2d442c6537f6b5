"""Run the layers of a model one by one, each with its own graph, and leave them unchanged."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from penstock.costs.counting.layer_calls import as_it_is
from penstock.model.entries import Entry, make_entry
from penstock.model.kept import as_before
from penstock.model.layers import Layers
from penstock.model.pytree import flatten, tree_map
from penstock.model.stage_plan import Step
from penstock.model.state import keeping_values
from penstock.torch_private import gradient_hooks, next_node_number, saving_hooks


class LayerRun(NamedTuple):
    """A layer that is to run: `run()` calls it on copies of its arguments.

    `entries` are the leaves of its graph that stand for those that want a gradient; nodes of it
    have numbers from `first_node` on, but for what the layer remembers.
    """

    step: Step
    run: Callable[[], Any]
    arguments: Any
    entries: list[Entry]
    first_node: int

    @property
    def device(self) -> torch.device:
        """The device of the layer's first tensor, or of its first argument."""
        tensors = chain(tensors_of(self.step.module), flatten(self.arguments)[0])
        return next((tensor.device for tensor in tensors), torch.device("cpu"))


Perform = Callable[[LayerRun], Any]
CallLayer = Callable[[Step, Callable[[], Any]], Any]
"""Runs a layer as a stage does: what that does around it takes time as well."""


def call_alone(step: Step, run: Callable[[], Any]) -> Any:
    """Run a layer with nothing around it."""
    return run()


def run_alone(
    layers: Layers, inputs: Any, perform: Perform, loss: nn.Module | None = None
) -> None:
    """Let `perform` run each layer on copies; what it returns leads to no other layer either.

    With a `loss`, which takes the model's output, that is run as one more layer.
    """

    def performed(step: Step, function: Any) -> Any:
        if step.index >= len(layers):  # a random operation between the layers of a model
            return function()
        device = device_of(step.module) if layers.model is None else None
        layer = _on_copies(step, function.func, (function.args, function.keywords), device)
        return tree_map(_leaving, perform(layer))

    output = layers.run(tree_map(Tensor.detach, inputs), performed)
    if loss is not None:
        step = Step(len(layers), "loss", "loss", loss, (), ())
        perform(_on_copies(step, loss, ((output,), {}), None))


def _on_copies(
    step: Step, function: Any, given: tuple[Any, Any], device: torch.device | None
) -> LayerRun:
    """Prepare a layer on copies of its arguments, with the leaves that stand for them."""
    first_node = next_node_number()
    entries: list[Entry] = []

    def entering(tensor: Tensor) -> Tensor:
        """Copy a tensor for the layer, which may change it in place."""
        if not wants_gradient(tensor) or not torch.is_grad_enabled():
            return tensor.detach().to(device, copy=True)
        entries.append(make_entry(tensor.detach().to(device), wants_grad=True))
        return entries[-1].tensor.clone()

    args, keywords = arguments = tree_map(entering, given)
    return LayerRun(step, partial(function, *args, **keywords), arguments, entries, first_node)


def _leaving(tensor: Tensor) -> Tensor:
    """Copy a layer's result: it wants a gradient where the model's own does."""
    copy = tensor.detach().clone()
    return copy.requires_grad_().clone() if wants_gradient(tensor) else copy


def wants_gradient(tensor: Tensor) -> bool:
    """Tell whether a tensor gets a gradient from later layers."""
    return tensor.requires_grad and tensor.layout is torch.strided


def device_of(module: nn.Module) -> torch.device | None:
    """Return the device a layer is on; None if it has nothing that would say so."""
    return next((tensor.device for tensor in tensors_of(module)), None)


def tensors_of(module: nn.Module) -> chain[Tensor]:
    """Iterate over parameters and buffers."""
    return chain(module.parameters(), module.buffers())


@contextmanager
def named(step: Step) -> Iterator[None]:
    """Note on an error which layer raised it."""
    try:
        yield
    except Exception as error:
        error.add_note(f"raised in layer {step.label}, micro-batch 0, while its cost was measured")
        raise


@contextmanager
def untouched(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Record gradients and save tensors as usual; put back what modules and generators were."""
    with as_before(modules), torch.enable_grad(), _saving_as_usual():
        yield


def _saving_as_usual() -> AbstractContextManager[Any]:
    """Set hooks aside that would change what autograd saves: the caller may be in a checkpoint."""
    if saving_hooks() is None:
        return nullcontext()
    return saved_tensors_hooks(as_it_is, as_it_is)


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
