"""Apply the user's activation checkpoints to the blocks inside them.

A checkpoint would run code between blocks again in the backward, where there is no current pass.
So each block call inside gets its own checkpoint, and the operations between them none.  The
numbers are the same.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import checkpoint as torchs

from penstock.errors import CutError
from penstock.model.pytree import Structure, flatten, unflatten
from penstock.torch_private import checkpoint_generator

from .ghost import CURRENT, ghosts_in

_options = inspect.signature(checkpoint_generator)


def routed_generator(*args: Any, **kwargs: Any) -> Iterator[None]:
    """Replace torch's generator, which runs before and after the function in a checkpoint."""
    current = CURRENT.get()
    if current is None or current.is_inside:
        yield from checkpoint_generator(*args, **kwargs)
        return
    given = _options.bind(*args, **kwargs).arguments
    kept = {n: v for n, v in given.items() if n not in ("fn", "args", "kwargs")}
    with around_blocks(current, partial(torchs.checkpoint, use_reentrant=False, **kept)):
        yield


def reentrant(current: Any, function: Callable[..., Any], preserves: bool, *args: Any) -> Any:
    """Run the function of a reentrant checkpoint.

    A CutError refuses arguments that require no gradient: torch would give the parameters none.
    """
    is_block = current.knows(function)
    wants_grad = any(ghost.requires_grad for ghost in ghosts_in(args))
    if torch.is_grad_enabled() and not wants_grad and not is_block:
        raise CutError(
            "a reentrant checkpoint around blocks is given nothing that requires a gradient, so "
            "that what is inside gets none. Use checkpoint(..., use_reentrant=False)"
        )
    checkpoint = partial(torchs.checkpoint, use_reentrant=True, preserve_rng_state=preserves)
    with around_blocks(current, checkpoint):
        return function(*args)


@contextmanager
def around_blocks(current: Any, checkpoint: Callable[..., Any]) -> Iterator[None]:
    """Make a pass put `checkpoint` around each block that is called in this context."""
    before, current.checkpoint = current.checkpoint, checkpoint
    try:
        yield
    finally:
        current.checkpoint = before


def checkpointed(
    checkpoint: Callable[..., Any],
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Call a function in a checkpoint.

    Each tensor is an argument of its own: a reentrant checkpoint does not see nested ones.
    """
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    leaves, structure = flatten((args, kwargs))
    forms: list[Structure] = []

    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        own_args, own_kwargs = unflatten(structure, list(tensors))
        given, form = flatten(function(*own_args, **own_kwargs))
        forms.append(form)
        return tuple(given)

    given = checkpoint(run, *leaves)
    return unflatten(forms[0], list(given))
