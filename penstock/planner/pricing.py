"""What layers cost on the devices of a cluster, looked up once by size and kind of device."""

from functools import cache, cached_property

from penstock.costs.cluster import Cluster
from penstock.costs.collectives import all_reduce_s
from penstock.costs.prices import Prices, prices
from penstock.costs.profile import LayerSeconds, Profile

from .layer_seconds import bytes_of, layer_seconds
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

    def _prices(self, kind: str, microbatch_size: int) -> Prices:
        devices, measured_on = self.cluster.devices, self.profile.measured_on
        like = next((each for each in devices.values() if each.name == measured_on), None)
        return prices(self.profile, devices[kind], microbatch_size, like=like)

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
            sum(layer.forward_s + layer.backward_s for layer in found.layers)
            for found in (
                prices(self.profile, None, microbatch_size, busy=busy) for busy in (False, True)
            )
        )
        return min(1.0, alone_s / busy_s) if busy_s else None

    def _seconds(
        self, kind: str, microbatch_size: int, num_microbatches: int, issue_speed: float = 1.0
    ) -> tuple[LayerSeconds, ...]:
        found, device = self.prices(kind, microbatch_size), self.cluster.devices[kind]
        return layer_seconds(found, self.profile.weights, device, num_microbatches, issue_speed)

    def _bytes(
        self, kind: str, microbatch_size: int, *, copies_weights: bool = True
    ) -> StageBytes:
        found = bytes_of(self.prices(kind, microbatch_size))
        return StageBytes(found, copies_weights=copies_weights)
