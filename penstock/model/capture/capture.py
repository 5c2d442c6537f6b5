"""`penstock.capture`: turn any module into layers."""

import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from penstock.errors import CutError
from penstock.model.batch import check_values, undeclared
from penstock.model.layer_list import as_layers, is_plain_chain
from penstock.model.layers import Layers
from penstock.model.pytree import flatten
from penstock.torch_private import uncompiled
from penstock.trace.progress import saying

from .captured import record_model
from .check import prove_where_possible
from .inputs import ROUTED, as_call
from .source import captured_layers

Together = Sequence[str] | Sequence[Sequence[str]]


def capture(  # noqa: PLR0913 - the front door: each a keyword with a default
    model: nn.Module,
    example_inputs: Any,
    blocks: Sequence[str] | None = None,
    together: Together | None = None,
    inputs: str = ROUTED,
    *,
    keep: Sequence[str] = (),
    check: bool = True,
) -> Layers:
    """Return any module as layers, which are the calls of its blocks in order.

    The model keeps its class, names and `state_dict`.  Each stage runs the model's own Python, in
    which the blocks of other stages return placeholders.  Capture runs the model on the example in
    training mode, and on its first samples in evaluation mode.  It restores buffers, modes,
    gradients and random states.  A model on the meta device is captured without memory for its
    weights.

    Printing the result shows a table: layer, block, parameters and live bytes before it, then tied
    weights and warnings.

    Args:
        model: any module.
        example_inputs: the model's arguments: a mapping of keyword arguments, a tuple of
            positional ones, or a single value.  Later batches may have other sizes.
        blocks: name patterns of the blocks, such as "encoder.layer.*"; a stage starts at a block.
            Default: the entries of the model's lists, and other modules with parameters.
        together: name patterns of blocks that stay on one stage, with all calls between them; or
            several lists of such patterns.
        inputs: "first": the first stage gets the model's inputs, and sends them to their users;
            "everywhere": each stage gets them, and less is sent.
        keep: name patterns of blocks whose results are returned too.  Without gradients, as in
            eval_step, the output is then (output, {name: the block's result}).
        check: compare outputs and all gradients of the stages with the unsplit model, on one
            sample of the example or on more if one shows too little.  Only rank 0 does so, and
            only if the model has values.

    Raises:
        BatchError: the example has no values.
        CutError: the example does not fit the model's signature; a pattern fits nothing; a tensor
            passes between blocks by a side channel; the model keeps state outside its blocks.
        GlueError: code between blocks cannot be followed.
        CheckError: the stages do not compute the same as the model.
    """
    example_inputs = undeclared(example_inputs)
    _check_signature(model, example_inputs)
    on_meta = any(parameter.is_meta for parameter in model.parameters())
    check_values(flatten(example_inputs)[0], "example inputs", meta_is_fine=on_meta)
    name = type(model).__name__
    with saying(f"running {name} on the example, to find its blocks"):
        captured = record_model(
            model, example_inputs, blocks=blocks, together=together, inputs=inputs, keep=keep
        )
    if check:
        with saying(f"checking the cut {name} against the whole one"):
            captured = replace(captured, checked=prove_where_possible(captured, example_inputs))
    return captured_layers(captured)


def resolve_layers(model: Any, example_inputs: Any) -> Layers:
    """Return the layers of a list, a Sequential, layers, or any module with example inputs."""
    if is_plain_chain(model) or not isinstance(model, nn.Module) or example_inputs is None:
        return as_layers(model)
    return capture(model, example_inputs)


def _check_signature(model: nn.Module, example_inputs: Any) -> None:
    if not isinstance(model, nn.Module):
        raise CutError(f"capture takes an nn.Module, and was given a {type(model).__name__}")
    if uncompiled(model) is not None:
        raise CutError(
            f"the whole of {type(model).__name__} is compiled; give the model as it was, and "
            "compile its blocks (for block in model.layers: block.compile())"
        )
    args, kwargs = as_call(example_inputs)
    try:
        inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError as error:
        given = [f"{len(args)} positional"] if args else []
        raise CutError(
            f"example_inputs ({', '.join([*given, *kwargs])}) do not fit "
            f"{type(model).__name__}.forward{inspect.signature(model.forward)}: {error}. Give a "
            "mapping of keyword arguments, a tuple of positional ones, or a single value"
        ) from None
