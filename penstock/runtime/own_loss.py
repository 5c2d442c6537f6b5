"""Compare once how a model reduces a loss of its own with how micro-batches weigh."""

import math
import warnings
from typing import Any

import torch
from torch import nn

from penstock.errors import BatchError, OutputWarning
from penstock.model.batch import samples, undeclared
from penstock.model.capture.inputs import as_call
from penstock.model.capture.outer_state import as_it_was
from penstock.model.layers import Layers
from penstock.model.output_loss import counted_in, output_loss
from penstock.types import Reduction

from .microbatches import Call, raw_weights, shares

_ROUNDING = 1e-3
"""The relative difference that two ways of adding up may have, also in half precision."""


def warn_of_other_reduction(layers: Layers, example_inputs: Any, call: Call) -> None:
    """Warn where two equal micro-batches weigh otherwise than the two taken together.

    The first sample of the example is one micro-batch: how many tokens it counts makes no
    difference then.  The model is run in evaluation and left as it was.  Nothing is said where
    that shows nothing: without an example or values, or of a model that draws random numbers in
    evaluation or gives no loss there.
    """
    model = layers.model
    if model is None or example_inputs is None or not call.computes_loss:
        return
    if call.num_microbatches < 2 or any(tensor.is_meta for tensor in model.parameters()):
        return
    try:
        one, both = (samples(example_inputs, n, "example inputs") for n in ([0], [0, 0]))
        weights = _weights(one, call)
        alone, again, together = _losses(model, (one, one, both))
    except BatchError:
        return
    expected = sum(weights) * alone
    seen = (expected, together)
    if alone != again or not all(map(math.isfinite, seen)) or 0 in seen:
        return
    if not math.isclose(*seen, rel_tol=_ROUNDING):
        warnings.warn(_text(model, together / expected, call), OutputWarning, stacklevel=3)


def _weights(one: Any, call: Call) -> list[float]:
    """Weigh two equal micro-batches."""
    reduction = call.reduction if counted_in(one) < 0 else Reduction.SUM
    raw = raw_weights(reduction, [one, one], [1, 1])
    return shares(reduction, raw, sum(raw)) if any(raw) else [0.0, 0.0]


def _losses(model: nn.Module, batches: tuple[Any, ...]) -> list[float]:
    """Return the model's losses of batches; NaN where it gives none, or refuses one."""
    found = []
    with as_it_was(model, training=False), torch.no_grad():
        for batch in batches:
            args, keywords = as_call(undeclared(batch))
            try:
                found.append(float(output_loss(model(*args, **keywords))))
            except Exception:
                found.append(math.nan)
    return found


def _text(model: nn.Module, factor: float, call: Call) -> str:
    sums = "sums over samples, use reduction=penstock.Reduction.SUM"
    remedy = sums if factor > 1 else "is a mean, use reduction=penstock.Reduction.MEAN"
    return (
        f"{type(model).__name__} computes its loss itself, and that of two equal micro-batches "
        f"together is {factor:.4g} times their weighted sum (reduction={call.reduction}): losses "
        f"and gradients over {call.num_microbatches} micro-batches are not the whole batch's. If "
        f"it {remedy}; if it compares samples with each other, use num_microbatches=1"
    )
