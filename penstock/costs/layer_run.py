"""Run the layers of a model one by one, each with a graph of its own, and leave them as they were;
tell which are alike.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import chain
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from penstock.model.capture.watch import original_class
from penstock.model.entries import Entry, make_entry
from penstock.model.kept import as_before
from penstock.model.layers import Layers
from penstock.model.pytree import flatten, tree_map
from penstock.model.stage_plan import Step
from penstock.model.state import keeping_values
from penstock.torch_private import NEVER_COMPUTES, gradient_hooks, next_node_number, saving_hooks


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
        """Where it runs."""
        tensors = chain(_tensors_of(self.step.module), flatten(self.arguments)[0])
        return next((tensor.device for tensor in tensors), torch.device("cpu"))


Perform = Callable[[LayerRun], Any]


def run_alone(
    layers: Layers, inputs: Any, perform: Perform, loss: nn.Module | None = None
) -> None:
    """Let `perform` run each layer on copies; what it returns leads to no other layer either.

    With a `loss`, which takes the model's output, that is run as one more layer.
    """

    def performed(step: Step, run: Any) -> Any:
        if step.index >= len(layers):  # a random operation between the layers of a model
            return run()
        device = _device_of(step.module) if layers.model is None else None
        first = next_node_number()
        given, entries = _entered((run.args, run.keywords), device)
        again = partial(run.func, *given[0], **given[1])
        return tree_map(_leaving, perform(LayerRun(step, again, given, entries, first)))

    output = layers.run(tree_map(Tensor.detach, inputs), performed)
    if loss is not None:
        first = next_node_number()
        given, entries = _entered(output, None)
        step = Step(len(layers), "loss", "loss", loss, (), ())
        perform(LayerRun(step, partial(loss, given), given, entries, first))


def _entered(value: Any, device: torch.device | None) -> tuple[Any, list[Entry]]:
    """Copy what a layer is given; return the leaves, too, that stand for what wants gradients."""
    entries: list[Entry] = []
    return tree_map(partial(_entering, device, entries), value), entries


def _entering(device: torch.device | None, entries: list[Entry], tensor: Tensor) -> Tensor:
    """Copy a tensor for a layer, which may change it in place."""
    if not _wants_gradient(tensor) or not torch.is_grad_enabled():
        return tensor.detach().to(device, copy=True)
    entries.append(make_entry(tensor.detach().to(device), wants_grad=True))
    return entries[-1].tensor.clone()


def _leaving(tensor: Tensor) -> Tensor:
    """Copy what a layer gave: it wants a gradient where the model's own does."""
    copy = tensor.detach().clone()
    return copy.requires_grad_().clone() if _wants_gradient(tensor) else copy


def _wants_gradient(tensor: Tensor) -> bool:
    return tensor.requires_grad and tensor.layout is torch.strided


def _device_of(module: nn.Module) -> torch.device | None:
    """Return the device a layer is on; None if it has nothing that would say so."""
    return next((tensor.device for tensor in _tensors_of(module)), None)


def _tensors_of(module: nn.Module) -> chain[Tensor]:
    return chain(module.parameters(), module.buffers())


_OWN_PLACE = "its place in a list"


def kind_of(step: Step, arguments: Any) -> Hashable:
    """Return a value that is equal for layers of the same classes, sizes, settings and inputs.

    A layer's own number in a list and how often it drops something (unless never) do not count.
    Objects of other classes count by their class only.
    """
    places = frozenset(int(part) for part in step.name.split(".") if part.isdigit())
    parts = tuple(
        (path, original_class(part), _settings(part, places))
        for path, part in step.module.named_modules()
    )
    return parts, _fact(arguments)


def _settings(module: nn.Module, places: frozenset[int]) -> Hashable:
    return tuple((name, _setting(name, value, places)) for name, value in vars(module).items())


def _setting(name: str, value: Any, places: frozenset[int]) -> Hashable:
    if name.endswith("hooks"):
        return len(value)
    if type(value) is int and value in places:
        return _OWN_PLACE
    if isinstance(value, float) and (name == "p" or "drop" in name):
        return bool(value)
    return _fact(value)


def _fact(value: Any) -> Hashable:
    match value:
        case Tensor():
            return tuple(value.shape), value.dtype, value.device, value.requires_grad
        case bool() | int() | float() | str() | None | FunctionType():
            return value
        case tuple() | list():
            return tuple(map(_fact, value))
        case dict():
            return tuple((str(key), _fact(entry)) for key, entry in value.items())
        case _:
            return id(type(value))


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
