"""The fallback where a model's own Python cannot be followed: torch.export writes it as a graph.

The graph's modules have the names, the parameters and the buffers of the model's own, so that it
is recorded and cut as any other model.  There is one graph for training and one for evaluation;
what Python decided with the example is fixed in both.
"""

import inspect
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.export import Dim, ShapesCollection, unflatten

from penstock.errors import GlueError
from penstock.model.pytree import flatten
from penstock.torch_private import has_hooks

from .blocks import find_blocks
from .exported import Exported, check_modes
from .inputs import as_call

_ALWAYS = (
    "branches and loops on values, and arguments that are no tensors, are fixed as with the "
    "example; activation checkpointing and custom autograd functions are replaced by the "
    "operations inside them"
)


_SEQUENCE_DIMS = 3
"""Tensors of more dimensions are pictures or volumes."""


def export(
    model: nn.Module, example_inputs: Any, blocks: Sequence[str] | None
) -> tuple[Exported, list[str], list[str]]:
    """Write a model as graphs.

    Returns:
        The graphs as a module, the names of its blocks, and what the graphs lack.

    Raises:
        CutError: a part of the model is in another mode than the whole.
        GlueError: torch.export cannot follow the model.
    """
    check_modes(model)
    was_training = model.training
    graphs = {}
    try:
        for training in (True, False):
            model.train(training)
            graphs[training] = _graph(model, example_inputs)
    finally:
        model.train(was_training)
    exported = Exported(model, graphs)
    named = dict(exported.named_modules())
    names = [name for name in find_blocks(model, blocks) if name in named]
    again = [name for name in named if "@" in name and name.split("@")[0] in names]
    return exported, [*names, *again], list(_dropped(model))


def _graph(model: nn.Module, example_inputs: Any) -> nn.Module:
    """Write the model's graph in the mode it is in.

    Later batches may have other sizes, and sequences other lengths; pictures may not.
    """
    args, kwargs = as_call(example_inputs)
    given = inspect.signature(model.forward).bind(*args, **kwargs)  # by position if it can be
    args, kwargs = given.args, given.kwargs
    sizes = ShapesCollection()
    for leaf in flatten((args, kwargs))[0]:
        dims = 1 if leaf.dim() > _SEQUENCE_DIMS else leaf.dim()
        sizes[leaf] = dict.fromkeys(range(dims), Dim.AUTO)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, of what it will change some day
            shapes = sizes.dynamic_shapes(model, args, kwargs)
            program = torch.export.export(model, args, kwargs, dynamic_shapes=shapes)
            graph: nn.Module = unflatten(program)
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        cache = " (use_cache=False among the inputs leaves it out)" if "Cache" in lines[0] else ""
        raise GlueError(
            f"torch.export cannot follow {type(model).__name__} either: {lines[0]}{cache}. Change "
            "the code that it cannot follow"
        ) from error
    return graph


def _dropped(model: nn.Module) -> Iterator[str]:
    """Yield what a graph lacks of the model."""
    yield _ALWAYS
    for path, module in model.named_modules():
        if has_hooks(module):
            yield f"the hooks of '{path}' do not run"
