"""Layer costs per kind of device, with dispatch overhead, busy cores and gradient sums.

Every micro-batch but the first adds its gradients to a sum, in its backward.  Measured seconds of
a layer include that sum, so it is subtracted for the first micro-batch.  On an accelerator the
host issues operators while the device runs earlier ones, so the slower of the two counts.  The
loss counts with the last layer.
"""

from collections.abc import Sequence
from dataclasses import fields, replace
from functools import cache, cached_property

from penstock.costs.cluster import Cluster, Device
from penstock.costs.cluster.collectives import Collective, collective_s
from penstock.costs.layer_costs import layer_costs
from penstock.costs.profile import Profile
from penstock.costs.records import AtSize, LayerKind, LayerSeconds, LayerWeights

from .stage_bytes import StageBytes


class Pricing:
    """Prices of one profile on one cluster, which many plans share; all methods are cached.

    With `cuda_graphs` a step is one CUDA graph: the host issues no operators one by one.
    """

    def __init__(self, profile: Profile, cluster: Cluster, *, cuda_graphs: bool = False) -> None:
        self.profile, self.cluster, self.cuda_graphs = profile, cluster, cuda_graphs
        self.prices = cache(self._prices)
        self.seconds = cache(self._seconds)
        self.bytes = cache(self._bytes)
        self.sum_s = cache(self._sum_s)
        self.busy_speed = cache(self._busy_speed)

    @cached_property
    def between_processes(self) -> Cluster:
        """The cluster for ranks in separate processes."""
        return self.cluster.between_processes()

    def _sum_s(self, group: tuple[int, ...], num_bytes: int, *, processes: bool) -> float:
        cluster = self.between_processes if processes else self.cluster
        return collective_s(cluster, [group], Collective.ALL_REDUCE, num_bytes)

    def _prices(self, kind: str, microbatch_size: int) -> AtSize:
        devices, measured_on = self.cluster.devices, self.profile.measured_on
        like = next((x for x in devices.values() if x.name == measured_on), None)
        return layer_costs(self.profile, devices[kind], microbatch_size, like=like)

    def _busy_speed(self, microbatch_size: int) -> float | None:
        """Return the speed of layers on busy cores, as a share of alone; None: not measured."""
        sizes, measured_on = self.profile.sizes, self.profile.measured_on
        known = {device.name for device in self.cluster.devices.values()}
        kinds = [kind for size in sizes for kind in size.kinds]
        if measured_on not in known or any(kind.busy_seconds is None for kind in kinds):
            return None
        alone_s, busy_s = (
            sum(
                costs.seconds(n).forward_s + costs.seconds(n).backward_s
                for n in range(len(costs.kind_of))
            )
            for costs in (
                layer_costs(self.profile, None, microbatch_size, busy=busy)
                for busy in (False, True)
            )
        )
        return min(1.0, alone_s / busy_s) if busy_s else None

    def _seconds(
        self, kind: str, microbatch_size: int, num_microbatches: int
    ) -> tuple[LayerSeconds, ...]:
        costs, device = self.prices(kind, microbatch_size), self.cluster.devices[kind]
        issue_s = 0.0 if self.cuda_graphs else device.host_issue_s
        return layer_seconds(costs, self.profile.weights, device, num_microbatches, issue_s)

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
    issue_s: float = 0.0,
) -> tuple[LayerSeconds, ...]:
    """Return the seconds of each layer on a device, in a step of so many micro-batches, whose
    host issues an operator in `issue_s`.
    """
    # 1. Kinds of layers, whose operators the host issues one by one.
    rate = device.bytes_per_s
    adding = (num_microbatches - 1) / num_microbatches
    issued = [_issued(kind, issue_s) for kind in at.kinds]
    # 2. Layers, which add their gradients up; the loss counts with the last one.
    layers = []
    for kind, own_weights in zip(at.kind_of, weights, strict=True):
        # measured seconds have one sum for each micro-batch, the step has one fewer
        seconds, times = issued[kind], adding - issued[kind].is_measured
        adding_s = times * _PASSES_TO_ADD * own_weights.gradient_bytes / rate
        layers.append(
            replace(
                seconds,
                backward_s=max(0.0, seconds.backward_s + adding_s),
                weight_s=max(0.0, seconds.weight_s + adding_s),
            )
        )
    if at.loss is not None:
        layers[-1] = layers[-1].plus(_issued(at.loss, issue_s))
    return tuple(layers)


def commit_seconds(num_norms: int, device: Device, num_microbatches: int) -> float:
    """Return the seconds of the update of BatchNorms' running statistics.

    Each takes some small operators, and one for the moments of each micro-batch.
    """
    one_s = max(device.floor_s + device.gap_s, device.issue_s)
    return num_norms * (_OPERATORS_OF_A_COMMIT + num_microbatches) * one_s


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


def weights_together(weights: Sequence[LayerWeights]) -> LayerWeights:
    """Return the bytes of the weights of several layers."""
    sums = ((f.name, sum(getattr(x, f.name) for x in weights)) for f in fields(LayerWeights))
    return LayerWeights(**dict(sums))
