"""What a model is called with, and how that is routed to later stages."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from penstock.errors import BatchError
from penstock.model.batch import batch_size, split
from penstock.model.pytree import DictOf, Node, Structure, flatten, moved, tree_map, unflatten

from .ghost import Ghost
from .values import INPUT, START, EventKey, Told

ROUTED, EVERYWHERE = "first", "everywhere"
"""The model's inputs are given to the first stage and travel on, or are given to every stage."""


def as_call(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Give inputs as positional and keyword arguments."""
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, tuple):
        return example_inputs, {}
    return (example_inputs,), {}


def first_samples(example_inputs: Any, count: int) -> Any:
    """Take the first samples; None where there are not more, or it is not known.

    It is known if all that is cut into micro-batches has the same size there.
    """
    try:
        size = batch_size(example_inputs, "example inputs")
    except BatchError:
        return None
    if size <= count:
        return None
    return tree_map(Tensor.detach, split(example_inputs, [count, size - count])[0])


def routed(
    run: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Give ghosts for the model's inputs; on a later stage, those that the header tells of.

    A value is named by its argument and its place there, whatever else is given.
    """
    told = run.header.get(START)
    if told is None:
        ghosts: list[Ghost] = []
        structures: list[Structure] = []
        named: dict[int | str, Any] = dict(enumerate(args))
        named.update((name, kwargs[name]) for name in kwargs)
        for name, value in named.items():
            leaves, structure = flatten(value)
            structures.append(moved(structure, len(ghosts)))
            key = EventKey(f"{INPUT}{name}", 0, 0)
            ghosts += [run.given(key, place, leaf) for place, leaf in enumerate(leaves)]
        form = Node(DictOf(tuple(named)), tuple(structures))
        told = Told("inputs", form, tuple(ghost.info for ghost in ghosts), ())
        run.tell(START, told)
    else:
        ghosts = [run.stand_in(info) for info in told.infos]
    given = unflatten(told.structure, ghosts)
    positions = [name for name in given if isinstance(name, int)]
    return tuple(given.pop(name) for name in positions), given
