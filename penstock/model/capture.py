"""Any module as layers."""

import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from penstock.errors import ConfigError, CutError

from .ghost.inputs import ROUTED, as_call
from .ghost.layers import CapturedLayers
from .ghost.proven import prove_once
from .ghost.record_model import record_model
from .layers import Layer, Layers, as_layers

Together = Sequence[str] | Sequence[Sequence[str]]


def capture(
    model: nn.Module,
    example_inputs: Any,
    blocks: Sequence[str] | None = None,
    together: Together | None = None,
    inputs: str = ROUTED,
    *,
    check: bool = True,
) -> Layers:
    """Give any module as layers that a pipeline can cut: the calls of its blocks, in order.

    The model stays as it is, also its class, names and `state_dict`: each stage runs the model's
    own Python, in which the blocks of other stages give placeholders.  It is run on the example
    twice, in training and in evaluation mode; buffers, modes, gradients and random states are as
    before.  A model on the meta device is captured without memory for its weights.

    Printing the result gives a table: layer, block, parameters, live bytes before it, and below
    it tied weights and warnings.

    Args:
        model: any module.
        example_inputs: what it is called with: a mapping of keyword arguments, a tuple of
            positional ones, or a single value.  Later batches may have other sizes.
        blocks: patterns of names of modules ("encoder.layer.*") that a cut may lie before;
            default: the entries of the model's lists, and other modules with parameters.
        together: patterns of names of blocks that are to be on one stage, with all that is called
            between them; or several lists of such patterns.
        inputs: "first": the model's inputs are given to the first stage, and travel on to those
            that use them; "everywhere": each stage is given them, and less travels.
        check: compare the cut model with the whole one on two samples of the example, outputs and
            all gradients: once for a model, its code and library versions (the cache is in
            `PENSTOCK_CACHE`, by default ~/.cache/penstock).  Of several processes the first one
            does.  A model without values is not checked.

    Raises:
        CutError: the example does not fit the model's signature; a pattern fits nothing; a tensor
            passes between blocks on a side way; the model keeps state outside its blocks.
        GlueError: code between blocks cannot be followed.
        CheckError: the cut model is not the model.
    """
    _check_signature(model, example_inputs)
    captured = record_model(model, example_inputs, blocks=blocks, together=together, inputs=inputs)
    if check:
        captured = replace(captured, checked=prove_once(captured, example_inputs))
    return CapturedLayers.of(captured)


def resolve_layers(model: Any, example_inputs: Any) -> Layers:
    """Give layers for what a user calls a model: a list, a Sequential, layers, any module.

    Raises:
        ConfigError: it is any module, and there is no example to run it on; or is none of these.
    """
    is_chain = isinstance(model, nn.Sequential | nn.ModuleList | Sequence | Layer | Layers)
    if is_chain or not isinstance(model, nn.Module):
        return as_layers(model)
    if example_inputs is None:
        raise ConfigError(
            f"{type(model).__name__} is no nn.Sequential: give example_inputs= too, a batch as "
            "train_step is given; the model is run on it to see how its parts work together"
        )
    return capture(model, example_inputs)


def _check_signature(model: nn.Module, example_inputs: Any) -> None:
    if not isinstance(model, nn.Module):
        raise CutError(f"capture takes an nn.Module, and was given a {type(model).__name__}")
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
