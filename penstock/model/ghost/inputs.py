"""What a model is called with, and how that is routed to later stages."""

from collections.abc import Mapping
from typing import Any

from penstock.model.pytree import flatten, unflatten

from .values import START, Told

ROUTED, EVERYWHERE = "first", "everywhere"
"""The model's inputs are given to the first stage and travel on, or are given to every stage."""


def as_call(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Give inputs as positional and keyword arguments."""
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, tuple):
        return example_inputs, {}
    return (example_inputs,), {}


def routed(
    run: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Give ghosts for the model's inputs; on a later stage, those that the header tells of."""
    told = run.header.get(START)
    if told is None:
        leaves, structure = flatten((args, kwargs))
        ghosts = [run.given(START, place, leaf) for place, leaf in enumerate(leaves)]
        told = Told("inputs", structure, tuple(ghost.info for ghost in ghosts), ())
        run.tell(START, told)
    else:
        ghosts = [run.stand_in(info) for info in told.infos]
    routed_args, routed_kwargs = unflatten(told.structure, ghosts)
    return routed_args, routed_kwargs
