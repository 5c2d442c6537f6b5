"""Run the layers of a model one by one, each with a separate graph."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from penstock.costs.counting.layer_calls import as_it_is
from penstock.model.entries import Entry, make_entry
from penstock.model.kept import as_before, run_unnoticed
from penstock.model.layers import Layers
from penstock.model.materialize import tensors_of
from penstock.model.pytree import flatten, tree_map
from penstock.model.stage_plan import Step
from penstock.model.state import keeping_values
from penstock.torch_private import gradient_hooks, next_node_number, saving_hooks

_T = TypeVar("_T")


class LayerRun(NamedTuple):
    """A layer that is ready to run."""

    step: Step
    run: Callable[[], Any]
    """Calls the layer on copies of its arguments."""
    arguments: Any
    entries: list[Entry]
    """Leaves of its graph that stand for arguments that want a gradient."""
    first_node: int
    """Least number of the graph's nodes, except of graphs that the layer remembers."""

    @property
    def device(self) -> torch.device:
        """The device of the layer's first tensor, or of its first argument."""
        tensors = chain(tensors_of(self.step.module), flatten(self.arguments)[0])
        return next((tensor.device for tensor in tensors), torch.device("cpu"))


Perform = Callable[[LayerRun], Any]
CallLayer = Callable[[Step, Callable[[], Any]], Any]
"""Runs a layer as a stage does, with the stage's own work around it."""


def call_alone(step: Step, run: Callable[[], Any]) -> Any:
    """Run a layer with nothing around it."""
    return run()


def run_alone(
    layers: Layers, inputs: Any, perform: Perform, loss: nn.Module | None = None
) -> None:
    """Let `perform` run each layer, then the `loss`, on copies of its arguments."""

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
    step: Step, function: Any, originals: tuple[Any, Any], device: torch.device | None
) -> LayerRun:
    first_node = next_node_number()
    entries: list[Entry] = []

    def entering(tensor: Tensor) -> Tensor:
        """Copy a tensor for the layer, which may change it in place."""
        if not wants_gradient(tensor) or not torch.is_grad_enabled():
            return tensor.detach().to(device, copy=True)
        entries.append(make_entry(tensor.detach().to(device), wants_grad=True))
        return entries[-1].tensor.clone()

    args, keywords = arguments = tree_map(entering, originals)
    return LayerRun(step, partial(function, *args, **keywords), arguments, entries, first_node)


def _leaving(tensor: Tensor) -> Tensor:
    """Return a copy of a layer's result, which wants a gradient if the result does."""
    copy = tensor.detach().clone()
    return copy.requires_grad_().clone() if wants_gradient(tensor) else copy


def wants_gradient(tensor: Tensor) -> bool:
    """Tell if a tensor gets a gradient from later layers."""
    return tensor.requires_grad and tensor.layout is torch.strided


def device_of(module: nn.Module) -> torch.device | None:
    """Return the device of a layer; None for a layer without tensors."""
    return next((tensor.device for tensor in tensors_of(module)), None)


@contextmanager
def named(step: Step) -> Iterator[None]:
    """Add the layer's name to an error."""
    try:
        yield
    except Exception as error:
        error.add_note(f"raised in layer {step.label}, micro-batch 0, while its cost was measured")
        raise


def run_untouched(layers: Layers, run: Callable[[], _T]) -> _T:
    """Return the result of `run`, in which layers record gradients and save tensors as usual.

    The layers and the generators are as before afterwards; hooks do not run (see `unnoticed`).
    """

    def recording() -> _T:
        # The caller may be in a checkpoint, whose hooks would not save the layers' tensors.
        is_hooked = saving_hooks() is not None
        saving = saved_tensors_hooks(as_it_is, as_it_is) if is_hooked else nullcontext()
        with as_before([step.module for step in layers]), torch.enable_grad(), saving:
            return run()

    return run_unnoticed(layers.modules, recording)


@contextmanager
def untouched_gradients(module: nn.Module) -> Iterator[None]:
    """Run without hooks of parameters; restore hooks, gradients and attributes afterwards.

    A custom backward may add to `.grad`, or to an attribute of the parameter (`main_grad`).
    """
    parameters = list(module.parameters())
    gradients = [parameter.grad for parameter in parameters]
    attributes = [dict(vars(parameter)) for parameter in parameters]
    hooks = [(held, dict(held)) for p in parameters for held in gradient_hooks(p) if held]
    values = [value for held in attributes for value in held.values() if isinstance(value, Tensor)]
    with keeping_values([*values, *(g for g in gradients if g is not None)]):
        try:
            for held, _ in hooks:
                held.clear()
            yield
        finally:
            for held, before in hooks:
                held.update(before)
            for parameter, gradient, before in zip(parameters, gradients, attributes, strict=True):
                parameter.grad = gradient
                vars(parameter).clear()
                vars(parameter).update(before)
