"""What a chain of layers keeps, [start, end], from what was measured of each layer."""

from collections.abc import Sequence

import numpy as np

from penstock.costs.layer_bytes import LayerBytes

from .partition import sums
from .stage_work import Tables


def tables_of(of_layers: Sequence[LayerBytes]) -> Tables:
    """Return what each run of layers keeps; entries without layers mean nothing."""
    num_layers = len(of_layers)
    inner = sums([layer.inner for layer in of_layers])
    after = [layer.saved_inputs for layer in of_layers[1:]]
    between = [max(layer.saved_results, x) for layer, x in zip(of_layers, after, strict=False)]
    # values between layers: [start, end) has those that end before its last layer does
    values = np.zeros_like(inner)
    values[:-1, 1:] = sums(between)
    last = np.array([0, *(layer.saved_results for layer in of_layers)])
    last[num_layers] += of_layers[-1].results  # the loss saves about as much
    inputs = np.zeros_like(inner)
    inputs[:-1] = np.array([layer.inputs for layer in of_layers])[:, None]
    stays = np.zeros_like(inner)
    stays[0] = of_layers[0].inputs
    weights = sums([layer.left for layer in of_layers])
    return Tables(inputs + inner + values + last, inputs, weights, stays)
