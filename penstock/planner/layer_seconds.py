"""What each layer costs where it runs: its price, with what comes to it on a device.

Beside the layers' own work a backward adds gradients up: every micro-batch but the first reads the
sum and what is new, and writes the sum.  Where a layer was measured, that is in its seconds: there
it is left out for the first one.  On an accelerator the host issues operators while the device
works on earlier ones: what takes longer counts.  The loss counts with the last layer.
"""

from collections.abc import Sequence

from penstock.costs.device import Device
from penstock.costs.prices import LayerPrice, Prices
from penstock.costs.profile import AtSize, LayerKind, LayerSeconds, LayerWeights
from penstock.interval import likely

_PASSES_TO_ADD = 3
"""Read the sum, read what is new, write the sum."""


def layer_seconds(
    prices: Prices,
    weights: Sequence[LayerWeights],
    device: Device,
    num_microbatches: int,
    issue_speed: float = 1.0,
) -> tuple[LayerSeconds, ...]:
    """Return the seconds of each layer on a device, in a step of so many micro-batches.

    `issue_speed` is how fast the rank's thread issues operators, as a share of one that is alone.
    """
    rate = likely(device.bytes_per_s)
    adding = (num_microbatches - 1) / num_microbatches
    issue_s = 0.0 if device.torch_type == "cpu" else likely(device.issue_s) / issue_speed
    found = [
        _seconds(
            price,
            issue_s,
            (adding - price.adds_gradients) * _PASSES_TO_ADD * own.gradient_bytes / rate,
        )
        for price, own in zip(prices.layers, weights, strict=True)
    ]
    return (*found[:-1], _together(found[-1], _seconds(prices.loss, issue_s, 0.0)))


def update_seconds(weights: Sequence[LayerWeights], device: Device) -> tuple[float, ...]:
    """Return the seconds of the optimizer for each layer: what it moves, by the bandwidth."""
    rate = likely(device.bytes_per_s)
    return tuple(
        (2 * own.parameter_bytes + own.gradient_bytes + 2 * own.optimizer_bytes) / rate
        if own.gradient_bytes
        else 0.0
        for own in weights
    )


def _seconds(price: LayerPrice, issue_s: float, adding_s: float) -> LayerSeconds:
    forward_issue_s = price.forward_operators * issue_s
    backward_issue_s = price.backward_operators * issue_s
    return LayerSeconds(
        forward_s=max(price.forward_s, forward_issue_s),
        recompute_s=max(price.recompute_s, forward_issue_s),
        backward_s=max(0.0, max(price.backward_s, backward_issue_s) + adding_s),
        input_s=max(price.input_s, backward_issue_s / 2),
        weight_s=max(0.0, max(price.weight_s, backward_issue_s / 2) + adding_s),
    )


def _together(one: LayerSeconds, other: LayerSeconds) -> LayerSeconds:
    return LayerSeconds(
        forward_s=one.forward_s + other.forward_s,
        recompute_s=one.recompute_s + other.recompute_s,
        backward_s=one.backward_s + other.backward_s,
        input_s=one.input_s + other.input_s,
        weight_s=one.weight_s + other.weight_s,
    )


def bytes_of(prices: Prices) -> AtSize:
    """Return the bytes of prices as a profile has them."""
    *layers, loss = (
        LayerKind(operators=(), inner_bytes=each.inner_bytes, left_bytes=each.left_bytes)
        for each in (*prices.layers, prices.loss)
    )
    return AtSize(
        microbatch_size=prices.microbatch_size,
        kinds=tuple(layers),
        kind_of=tuple(range(len(layers))),
        values=prices.values,
        saved=prices.saved,
        loss=loss,
        loss_saved=prices.loss_saved,
        target_bytes=prices.target_bytes,
    )


def weights_together(weights: Sequence[LayerWeights]) -> LayerWeights:
    """Return the bytes of the weights of several layers."""
    return LayerWeights(
        parameter_bytes=sum(own.parameter_bytes for own in weights),
        gradient_bytes=sum(own.gradient_bytes for own in weights),
        optimizer_bytes=sum(own.optimizer_bytes for own in weights),
        buffer_bytes=sum(own.buffer_bytes for own in weights),
    )
