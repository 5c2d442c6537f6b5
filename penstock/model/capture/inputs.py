"""The arguments of a model's call, and their route to later stages."""

import inspect
from collections.abc import Mapping, Sequence
from itertools import count, takewhile
from typing import Any

from torch import Tensor, nn

from penstock.errors import BatchError, CutError
from penstock.model.batch import flat_batch
from penstock.model.open_containers import DictOf
from penstock.model.pytree import (
    Constant,
    Leaf,
    Node,
    Structure,
    flatten,
    tree_map,
    unflatten,
    with_new_containers,
)

from .events import INPUT, START, EventKey, Told
from .ghost import Ghost

ROUTED = "first"
"""Only the first stage gets the model's inputs; it sends them on."""
EVERYWHERE = "everywhere"
"""Every stage gets the model's inputs."""
Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments."""


def as_call(inputs: Any) -> Call:
    """Return inputs as positional and keyword arguments.

    A mapping holds keyword arguments, and positional ones under their numbers (a CutError refuses
    other keys); a tuple holds positional ones; any other value is the first one.
    """
    if not isinstance(inputs, Mapping):
        return inputs if isinstance(inputs, tuple) else (inputs,), {}
    keywords = dict(inputs)
    args = tuple(keywords.pop(n) for n in takewhile(keywords.__contains__, count()))
    for key in keywords:
        if not isinstance(key, str):
            raise CutError(
                f"the inputs have the key {key!r}: a mapping holds the model's arguments under "
                f"their names, and positional ones under their numbers 0, 1, ..., of which it has "
                f"{len(args)}. Give a mapping that is one argument itself as (mapping,)"
            )
    return args, keywords


def as_inputs(args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Return the arguments of a call as one value, the inverse of `as_call`.

    A single positional argument is that value itself; no arguments are None.
    """
    if keywords:
        return {**dict(enumerate(args)), **keywords}
    return args if len(args) > 1 else next(iter(args), None)


def names_of_positions(model: nn.Module) -> tuple[int | str, ...]:
    """Return the keyword of each positional parameter of a model's forward, or else its number."""
    parameters = inspect.signature(model.forward).parameters.values()
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return tuple(
        number if parameter.kind is parameter.POSITIONAL_ONLY else parameter.name
        for number, parameter in enumerate(positional)
    )


def refuse_microbatches(inputs: Any, model: nn.Module) -> None:
    """Raise BatchError for a list of mappings of the model's arguments, which was cut already."""
    if not isinstance(inputs, list) or not inputs:
        return
    names = set(names_of_positions(model))
    if all(isinstance(part, Mapping) and part.keys() <= names for part in inputs):
        raise BatchError(
            f"the inputs are a list of mappings with the model's arguments ({', '.join(inputs[0])}"
            "). A step takes one mini-batch and cuts it itself: give one mapping, with the "
            "micro-batches concatenated (torch.cat), or call train_step once for each"
        )


def first_samples(example_inputs: Any, count: int) -> Any:
    """Return the first samples; None if there are no more than `count`, or N is unknown.

    N is known if all values that are split into micro-batches have the same number of samples.
    """
    try:
        batch = flat_batch(example_inputs, "example inputs")
    except BatchError:
        return None
    if batch.num_samples <= count:
        return None
    return tree_map(Tensor.detach, batch.split([count, batch.num_samples - count])[0])


def arguments_for(run: Any, inputs: str, call: Call, names: Sequence[int | str]) -> Call:
    """Return the arguments with which a pass calls the model, in new containers.

    Routed `inputs` are ghosts; a later stage rebuilds them from the header.  A value's name is its
    parameter (`names` has one for each position) and its place in the argument.  So the name does
    not depend on other arguments, nor on passing it by position or by keyword.
    """
    if inputs != ROUTED:
        return with_new_containers(call)
    told = run.header.get(START)
    if told is None:
        args, kwargs = call
        ghosts: list[Ghost] = []
        structures: list[Structure] = []
        named: dict[int | str, Any] = dict(enumerate(args))
        named.update((name, kwargs[name]) for name in kwargs)
        for number, (name, value) in enumerate(named.items()):
            parameter = names[number] if number < min(len(args), len(names)) else name
            leaves, structure = flatten(value)
            structures.append(_moved(structure, len(ghosts)))
            key = EventKey(f"{INPUT}{parameter}", 0, 0)
            ghosts += [run.given(key, place, leaf) for place, leaf in enumerate(leaves)]
        form = Node(DictOf(tuple(named)), tuple(structures))
        told = Told("inputs", form, tuple(ghost.info for ghost in ghosts), ())
        run.tell(START, told)
    else:
        ghosts = [run.stand_in(info) for info in told.infos]
    given = unflatten(told.structure, ghosts)
    positions = [name for name in given if isinstance(name, int)]
    return tuple(given.pop(name) for name in positions), given


def _moved(structure: Structure, by: int) -> Structure:
    """Return the structure with its leaf numbers increased by `by`."""
    match structure:
        case Leaf(index):
            return Leaf(index + by)
        case Constant():
            return structure
        case Node(rebuild, children):
            return Node(rebuild, tuple(_moved(child, by) for child in children))
