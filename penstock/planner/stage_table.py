"""Prices of stages on meshes as arrays, and the dynamic program over them; see submeshes.py.

F[start, stages, devices left]     computed from the last layer on: each end updates all its starts
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import compress
from math import inf
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[Any]
_MANY = 1 << 40
"""More devices than any cluster has."""


class Hosts(NamedTuple):
    """Hosts of one kind: their number, devices per host, and usable bytes per device."""

    num_hosts: int
    num_devices: int
    memory_bytes: float = inf


class Submesh(NamedTuple):
    """The devices of a stage: some of one host of a kind, or all of several hosts.

    Given `devices` may be any of the hosts', arranged in a `shape`; () leaves both to the planner.
    """

    kind: int
    num_hosts: int
    num_devices: int
    devices: tuple[int, ...] = ()
    shape: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        return len(self.devices) or self.num_hosts * self.num_devices


class Stage(NamedTuple):
    """Layers [start, end) on a mesh."""

    start: int
    end: int
    submesh: Submesh


class Task(NamedTuple):
    """A search for stages: the layers, the hosts, and the prices of stages on meshes.

    `prices(submesh)` are five prices of layers [start, end) as a stage on a mesh, as
    [price, start, end], infinite for an impossible stage; bytes are those of the fullest device:

    - seconds of a micro-batch's forward and backward
    - bytes of weights, gradients and the optimizer
    - bytes that each micro-batch in flight keeps
    - seconds to hand a micro-batch's values to the next stage and to get its gradients
    - seconds of collectives that run once a step, after the stage's last backward
    """

    num_layers: int
    hosts: Sequence[Hosts]
    prices: Callable[[Submesh], Numbers]
    num_microbatches: int


@lru_cache(maxsize=1)  # one task is searched several times, with and without a limit
def _prices(task: Task, meshes: tuple[Submesh, ...]) -> Numbers:
    """Return the prices as [field, mesh, end, start]; impossible stages take infinite seconds."""
    prices = np.stack([task.prices(mesh) for mesh in meshes], axis=1).swapaxes(2, 3)
    prices[1:, ~np.isfinite(prices[0])] = 0.0  # so that sums of bytes stay finite
    return prices


class StageTable:
    """Prices as arrays [mesh, end, start].

    `total` are seconds with the handover, and of the first stage its sums of gradients; `pace` the
    seconds between micro-batches, infinite for a stage that does not fit.
    """

    def __init__(self, task: Task, meshes: Sequence[Submesh], num_stages: int, ahead: int) -> None:
        # 1. The meshes that some stage may have, their devices, and where a mesh may come.
        num_layers, hosts, _, num_microbatches = task
        self.num_layers, self.num_stages, self.ahead = num_layers, num_stages, ahead
        self.hosts = hosts
        self.devices = tuple(host.num_hosts * host.num_devices for host in hosts)
        prices = _prices(task._replace(hosts=tuple(hosts)), tuple(meshes))
        may_be = np.isfinite(prices[0]).any(axis=(1, 2))
        may_be |= not may_be.any()
        prices, self.meshes = prices[:, may_be], [*compress(meshes, may_be)]
        self.sizes = np.zeros((len(self.meshes), len(hosts)), dtype=int)
        """Devices of each kind that a mesh uses."""
        for size, mesh in zip(self.sizes, self.meshes, strict=True):
            size[mesh.kind] = mesh.size
        self.may_be_next = self._host_by_host()
        """By the devices left of each kind, whether the next stage may have a mesh."""
        # 2. Seconds of each stage.
        prices[3, :, num_layers] = 0.0  # no stage comes after the last layer
        seconds, self.stay, self.kept, handover, once = prices
        self.total = seconds + handover
        self.pace = np.maximum(seconds, self.total / ahead)
        self.total[:, :, 0] += once[:, :, 0]  # the first stage ends last, and so do its sums
        # 3. The most stages from this one on: each of them adds `ahead` micro-batches to keep.
        self.memory = np.array([hosts[mesh.kind].memory_bytes for mesh in self.meshes])
        self.most_in_flight = num_microbatches
        room = self.memory[:, None, None] - self.stay
        many = np.full_like(room, inf)
        np.divide(room, self.kept, out=many, where=self.kept > 0)
        many[many >= self.most_in_flight] = inf
        self.deepest = np.where(room < 0, 0, np.floor((many - 1) / ahead) + 1)
        """The most stages from this one to the last, so that this one fits its memory."""
        self.pace[self.deepest < 1] = inf

    def _host_by_host(self) -> Numbers:
        """Return which meshes may be next, as [mesh, devices left of each kind].

        Stages fill one host after the other: a part of a host needs room in the current host, and
        whole hosts or another kind of hosts need that no host is partly used.
        """
        may_be_next = np.ones((len(self.meshes), *(n + 1 for n in self.devices)), dtype=bool)
        left = np.indices(may_be_next.shape[1:])
        sizes = [host.num_devices for host in self.hosts]
        is_whole = [here % whole == 0 for here, whole in zip(left, sizes, strict=True)]
        for may, (kind, num_hosts, number, *_) in zip(may_be_next, self.meshes, strict=True):
            room = (left[kind] - 1) % sizes[kind] + 1
            may &= (left[kind] >= num_hosts * number) & (room >= number)
            for other in is_whole[:kind] + is_whole[kind + 1 :]:
                may &= other
        return may_be_next

    def within(self, bound_s: float) -> Numbers:
        """Return `total`, infinite for stages whose pace is above a bound."""
        return np.where(self.pace <= bound_s, self.total, inf)

    def least_seconds(self, total: Numbers, limit_s: float) -> Numbers:
        """Return F of the stages with a finite `total`."""

        def cost(mesh: int, end: int, start: int, stages: Numbers) -> Numbers:
            deep = self.deepest[mesh, end, start:end, None]
            return np.where(deep >= stages, total[mesh, end, start:end, None], inf)

        return self._least(total, cost, np.add, limit_s)

    def least_excess(self) -> float:
        """Return the least bytes that the fullest device lacks; infinite: no stages can be."""
        can = np.where(np.isfinite(self.total), 0.0, inf)

        def excess(mesh: int, end: int, start: int, stages: Numbers) -> Numbers:
            at = mesh, end, slice(start, end), None
            in_flight = np.minimum((stages - 1) * self.ahead + 1, self.most_in_flight)
            need = self.stay[at] + in_flight * self.kept[at]
            lacks: Numbers = np.maximum(need - self.memory[mesh], 0.0) + can[at]
            return lacks

        alone = np.maximum(self.stay + self.kept - self.memory[:, None, None], 0.0)
        ceiling = float((self.stay + self.num_stages * self.ahead * self.kept).max())
        fewest, limit = inf, max(min(ceiling, float(self.memory.max())) / 64, 1.0)
        # a low limit prunes most states, so limits double until an answer is within one
        while fewest > limit:
            limit = limit * 2 if limit < ceiling else inf
            low = np.where(alone <= limit, can, inf)
            least = self._least(low, excess, np.maximum, limit)
            at: Any = (0, slice(None), *self.devices)
            fewest = float(least[at].min())
        return fewest

    def _least(
        self,
        total: Numbers,
        cost: Callable[[int, int, int, Numbers], Numbers],
        join: Callable[[Numbers, Numbers], Numbers],
        limit: float = inf,
    ) -> Numbers:
        """Return F as [start, stages, devices left of each kind ...] by stages with finite
        `total`: infinite if all answers are above the limit or need more devices than there
        are.

        `cost(mesh, end, first start, stages)` is an array [start, stages].
        """
        # 1. F of no layers is 0; find the first start of each mesh and end.
        num_layers = self.num_layers
        shape = (num_layers + 1, self.num_stages + 1, *(number + 1 for number in self.devices))
        least = np.full(shape, inf)
        least[num_layers, 0] = 0.0
        possible = np.isfinite(total)
        first = np.where(possible.any(axis=2), possible.argmax(axis=2), num_layers)
        # 2. Bounds for pruning: seconds and devices that the layers before a start need at least.
        before_s, before = self.before(total)
        before = np.minimum.accumulate(before[::-1])[::-1]  # what any later start needs as well
        spare = (before if len(self.devices) == 1 else before * 0).astype(int)
        # 3. From the last end on, put each mesh before all answers that begin at this end.
        for end in range(num_layers, 0, -1):
            after = least[end]
            after[after + before_s[end] > limit] = inf
            # Only the box of finite answers is computed.
            box = _box(np.isfinite(after))
            if box is None or box[0].start == self.num_stages:
                continue
            stages = slice(box[0].start, min(box[0].stop, self.num_stages))
            num_stages = np.arange(stages.start + 1, stages.stop + 1)
            low = [along.start for along in box[1:]]
            starts = first[:, end]
            # The devices that may be left: what the layers before a start need stays over.
            highs = np.array(shape[2:]) - self.sizes - spare[starts, None]
            for mesh in np.flatnonzero((starts < end) & (highs > low).all(axis=1)).tolist():
                start, size, high = int(starts[mesh]), self.sizes[mesh].tolist(), highs[mesh]
                rest = tuple(slice(a, int(b)) for a, b in zip(low, high, strict=True))
                pairs = zip(rest, size, strict=True)
                with_mesh = tuple(slice(x.start + n, x.stop + n) for x, n in pairs)
                more = slice(num_stages[0], num_stages[-1] + 1)
                here = least[(slice(start, end), more, *with_mesh)]
                costs = cost(mesh, end, start, num_stages).reshape(
                    -1, len(num_stages), *(1 for _ in self.devices)
                )
                joined = join(costs, after[(stages, *rest)])
                at: Any = (mesh, *with_mesh)
                np.minimum(here, joined, out=here, where=self.may_be_next[at])
        return least

    def before(self, total: Numbers) -> tuple[Numbers, Numbers]:
        """Return the least seconds and the fewest devices of all layers before each layer."""
        sizes = np.where(np.isfinite(total), self.sizes.sum(axis=1)[:, None, None], _MANY)
        sums = []
        for costs in (total.min(axis=0), sizes.min(axis=0)):
            least = np.zeros(len(costs))
            for end in range(1, len(costs)):
                least[end] = (least[:end] + costs[end, :end]).min()
            sums.append(least)
        return sums[0], sums[1]

    def num_needed(self, bound_s: float) -> float:
        """Return a lower bound on the devices with which all stages keep to a bound."""
        deepest = np.where(self.pace <= bound_s, self.deepest, 0)
        size = self.sizes.sum(axis=1)[:, None, None]
        counts = np.minimum(deepest, self.num_stages).astype(int)
        changes = np.bincount(counts.ravel(), minlength=self.num_stages + 1)
        needed = np.append(np.full(self.num_layers, inf), 0.0)
        best, sizes = inf, needed
        # One stage more at the front: `needed[start]` for so many stages from `start` on.
        for stages in range(1, self.num_stages + 1):
            if stages == 1 or changes[stages - 1]:
                sizes = np.where(deepest >= stages, size, inf).min(axis=0)
            if sizes.min() + needed.min() >= best:  # neither gets less with more stages
                break
            needed = np.append((sizes + needed[:, None]).min(axis=0), inf)
            best = min(best, float(needed[0]))
        return best


def _box(where: Numbers) -> tuple[slice, ...] | None:
    slices = []
    for axis in range(where.ndim):
        others = tuple(n for n in range(where.ndim) if n != axis)
        along = np.flatnonzero(where.any(axis=others))
        if not len(along):
            return None
        slices.append(slice(int(along[0]), int(along[-1]) + 1))
    return tuple(slices)
