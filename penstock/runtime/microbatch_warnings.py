"""Warn of models whose results depend on how a batch is divided into micro-batches."""

import math
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from penstock.errors import BatchError, OutputWarning, StatisticsWarning
from penstock.model.batch import samples, undeclared
from penstock.model.capture.inputs import as_call
from penstock.model.capture.outer_state import as_it_was
from penstock.model.layers import Layers
from penstock.model.output_loss import counted_in, output_loss
from penstock.types import Reduction

from .microbatches import Call, raw_weights, shares

_ROUNDING = 1e-3
"""Relative difference that rounding may cause between two sums, also in half precision."""
_HISTORY = "amax_history"
"""Part of the names of tensors with the largest values of earlier micro-batches."""


def warn_of_other_reduction(layers: Layers, example_inputs: Any, call: Call) -> None:
    """Warn if the loss of two equal micro-batches differs from the loss of both as one.

        loss([x]) and loss([x])  ──►  weighted sum   ≟   loss([x, x])

    x is the first sample of the example, so its number of tokens does not matter.  The model runs
    in evaluation and stays unchanged.  The check needs an example, values, and a loss without
    random numbers in evaluation; else it does nothing.
    """
    model = layers.model
    if model is None or example_inputs is None or not call.computes_loss:
        return
    if call.num_microbatches < 2 or any(tensor.is_meta for tensor in model.parameters()):
        return
    # Compare the loss of [x, x] with the weighted sum of two losses of [x].
    try:
        one, both = (samples(example_inputs, n, "example inputs") for n in ([0], [0, 0]))
        reduction = call.reduction if counted_in(one) < 0 else Reduction.SUM
        raw = raw_weights(reduction, [one, one], [1, 1])
        weights = shares(reduction, raw, sum(raw)) if any(raw) else [0.0, 0.0]
        alone, again, together = _losses(model, (one, one, both))
    except BatchError:
        return
    expected = sum(weights) * alone
    seen = (expected, together)
    # A loss that draws, or is not finite, or is 0, tells nothing.
    if alone != again or not all(map(math.isfinite, seen)) or 0 in seen:
        return
    if not math.isclose(*seen, rel_tol=_ROUNDING):
        warnings.warn(_text(model, together / expected, call), OutputWarning, stacklevel=3)


def _losses(model: nn.Module, batches: tuple[Any, ...]) -> list[float]:
    """Return the model's losses of batches; NaN if it raises or returns no loss."""
    losses = []
    with as_it_was(model, training=False), torch.no_grad():
        for batch in batches:
            args, keywords = as_call(undeclared(batch))
            try:
                losses.append(float(output_loss(model(*args, **keywords))))
            except Exception:
                losses.append(math.nan)
    return losses


def _text(model: nn.Module, factor: float, call: Call) -> str:
    sums = "sums over samples, use reduction=penstock.Reduction.SUM"
    remedy = sums if factor > 1 else "is a mean, use reduction=penstock.Reduction.MEAN"
    return (
        f"{type(model).__name__} computes its loss itself, and that of two equal micro-batches "
        f"together is {factor:.4g} times their weighted sum (reduction={call.reduction}): losses "
        f"and gradients over {call.num_microbatches} micro-batches are not the whole batch's. If "
        f"it {remedy}; if it compares samples with each other, use num_microbatches=1"
    )


def warn_of_scale_history(modules: Iterable[nn.Module]) -> None:
    """Warn once if modules keep a history of largest values, as delayed scaling does.

    Known are tensors named "...amax_history...", and the `fp8_meta` of TransformerEngine, unless
    its recipe is one that scales by the tensor at hand.
    """
    everyone = dict.fromkeys(m for root in modules for m in root.modules())
    kinds = {type(module).__name__ for module in everyone if _keeps_history(module)}
    if kinds:
        warnings.warn(
            f"float8 scales of {', '.join(sorted(kinds))} may come from a history of earlier "
            "micro-batches (delayed scaling), so the bits depend on the number of stages and the "
            "schedule. Use a recipe that scales by the tensor at hand: torchao's Float8Linear, or "
            "Float8CurrentScaling or MXFP8BlockScaling of TransformerEngine",
            StatisticsWarning,
            stacklevel=5,
        )


def _keeps_history(module: nn.Module) -> bool:
    attributes = vars(module)
    if any(_HISTORY in name for name in (*attributes, *dict(module.named_buffers(recurse=False)))):
        return True
    meta: Any = attributes.get("fp8_meta")
    if not isinstance(meta, dict):
        return False
    recipe = meta.get("recipe")  # there from the first forward on
    return recipe is None or f"{_HISTORY}_len" in dir(recipe)
