"""Layer costs per kind of device, with dispatch overhead, busy cores and gradient sums.

Beside the layers' own work a backward adds gradients up: every micro-batch but the first reads the
sum and what is new, and writes the sum.  Where a layer was measured, that is in its seconds: there
it is left out for the first one.  On an accelerator the host issues operators while the device
works on earlier ones: what takes longer counts.  The loss counts with the last layer.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, cached_property

from penstock.costs.cluster import Cluster, Device
from penstock.costs.cluster.collectives import all_reduce_s
from penstock.costs.layer_costs import layer_costs
from penstock.costs.profile import Profile
from penstock.costs.records import AtSize, LayerKind, LayerSeconds, LayerWeights

from .stage_bytes import StageBytes


class Pricing:
    """Prices of one profile on one cluster, whose figures are numbers; many plans share them."""

    def __init__(self, profile: Profile, cluster: Cluster) -> None:
        self.profile, self.cluster = profile, cluster
        self.prices = cache(self._prices)
        self.seconds = cache(self._seconds)
        self.bytes = cache(self._bytes)
        self.sum_s = cache(self._sum_s)
        self.busy_speed = cache(self._busy_speed)

    @cached_property
    def between_processes(self) -> Cluster:
        """The cluster as ranks see it that are processes."""
        return self.cluster.between_processes()

    def _sum_s(self, group: tuple[int, ...], num_bytes: int, *, processes: bool) -> float:
        """Return the seconds of a sum over the devices of a group."""
        return all_reduce_s(
            self.between_processes if processes else self.cluster, group, num_bytes
        )

    def _prices(self, kind: str, microbatch_size: int) -> AtSize:
        devices, measured_on = self.cluster.devices, self.profile.measured_on
        like = next((each for each in devices.values() if each.name == measured_on), None)
        return layer_costs(self.profile, devices[kind], microbatch_size, like=like)

    def _busy_speed(self, microbatch_size: int) -> float | None:
        """Return how fast the layers run while all cores of a host are busy with them, as a share
        of alone; None where that was not measured.
        """
        sizes, measured_on = self.profile.sizes, self.profile.measured_on
        known = {device.name for device in self.cluster.devices.values()}
        kinds = [kind for size in sizes for kind in size.kinds]
        if measured_on not in known or any(kind.busy_seconds is None for kind in kinds):
            return None
        alone_s, busy_s = (
            sum(
                found.seconds(n).forward_s + found.seconds(n).backward_s
                for n in range(len(found.kind_of))
            )
            for found in (
                layer_costs(self.profile, None, microbatch_size, busy=busy)
                for busy in (False, True)
            )
        )
        return min(1.0, alone_s / busy_s) if busy_s else None

    def _seconds(
        self, kind: str, microbatch_size: int, num_microbatches: int
    ) -> tuple[LayerSeconds, ...]:
        found, device = self.prices(kind, microbatch_size), self.cluster.devices[kind]
        return layer_seconds(found, self.profile.weights, device, num_microbatches)

    def _bytes(
        self, kind: str, microbatch_size: int, *, copies_weights: bool = True
    ) -> StageBytes:
        return StageBytes(self.prices(kind, microbatch_size), copies_weights=copies_weights)


_OPERATORS_OF_A_COMMIT = 28
"""As `runtime.batch_norm` commits."""
_PASSES_TO_ADD = 3
"""Read the sum, read what is new, write the sum."""


def layer_seconds(
    at: AtSize,
    weights: Sequence[LayerWeights],
    device: Device,
    num_microbatches: int,
) -> tuple[LayerSeconds, ...]:
    """Return the seconds of each layer on a device, in a step of so many micro-batches."""
    rate = device.bytes_per_s
    adding = (num_microbatches - 1) / num_microbatches
    issue_s = 0.0 if device.torch_type == "cpu" else device.issue_s
    issued = [_issued(kind, issue_s) for kind in at.kinds]
    found = []
    for kind, own in zip(at.kind_of, weights, strict=True):
        times = adding - issued[kind].is_measured
        found.append(_adding(issued[kind], times * _PASSES_TO_ADD * own.gradient_bytes / rate))
    if at.loss is None:
        return tuple(found)
    return (*found[:-1], _together(found[-1], _issued(at.loss, issue_s)))


def commit_seconds(num_norms: int, device: Device, num_microbatches: int) -> float:
    """Return the seconds of moving BatchNorms' running statistics by all micro-batches: each takes
    some small operators, and reads a row of moments of each micro-batch.
    """
    one_s = max(device.floor_s + device.gap_s, device.issue_s)
    return num_norms * (_OPERATORS_OF_A_COMMIT + num_microbatches) * one_s


def update_seconds(weights: Sequence[LayerWeights], device: Device) -> tuple[float, ...]:
    """Return the seconds of the optimizer for each layer: what it moves, by the bandwidth."""
    rate = device.bytes_per_s
    return tuple(
        (2 * own.parameter_bytes + own.gradient_bytes + 2 * own.optimizer_bytes) / rate
        if own.gradient_bytes
        else 0.0
        for own in weights
    )


def _issued(kind: LayerKind, issue_s: float) -> LayerSeconds:
    """Return the seconds of a layer whose operators the host issues one by one."""
    price = kind.seconds
    assert price is not None, "it is priced"
    if not issue_s:
        return price
    forward_issue_s, backward_issue_s = kind.num_forward * issue_s, kind.num_backward * issue_s
    return replace(
        price,
        forward_s=max(price.forward_s, forward_issue_s),
        recompute_s=max(price.recompute_s, forward_issue_s),
        backward_s=max(price.backward_s, backward_issue_s),
        input_s=max(price.input_s, backward_issue_s / 2),
        weight_s=max(price.weight_s, backward_issue_s / 2),
    )


def _adding(seconds: LayerSeconds, adding_s: float) -> LayerSeconds:
    """Return the seconds where what is added to gradients takes so much more, or less."""
    return replace(
        seconds,
        backward_s=max(0.0, seconds.backward_s + adding_s),
        weight_s=max(0.0, seconds.weight_s + adding_s),
    )


def _together(one: LayerSeconds, other: LayerSeconds) -> LayerSeconds:
    return LayerSeconds(
        forward_s=one.forward_s + other.forward_s,
        recompute_s=one.recompute_s + other.recompute_s,
        backward_s=one.backward_s + other.backward_s,
        input_s=one.input_s + other.input_s,
        weight_s=one.weight_s + other.weight_s,
    )


def weights_together(weights: Sequence[LayerWeights]) -> LayerWeights:
    """Return the bytes of the weights of several layers."""
    return LayerWeights(
        parameter_bytes=sum(own.parameter_bytes for own in weights),
        gradient_bytes=sum(own.gradient_bytes for own in weights),
        optimizer_bytes=sum(own.optimizer_bytes for own in weights),
        buffer_bytes=sum(own.buffer_bytes for own in weights),
        num_norms=sum(own.num_norms for own in weights),
        partial_bytes=sum(own.partial_bytes for own in weights),
    )
