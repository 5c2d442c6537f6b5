"""Prices of stages on meshes as arrays, and the dynamic program over them; see submeshes.py.

F[start, stages, devices left]     from the last layer on, each end pushed to all its starts
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import inf
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[Any]
_MANY = 1 << 40
"""More devices than there are."""


class Hosts(NamedTuple):
    """Hosts of one kind: how many, with how many devices, and bytes a stage may use of each."""

    num_hosts: int
    num_devices: int
    memory_bytes: float = inf


class Submesh(NamedTuple):
    """The devices of a stage: some of one host of a kind, or all of several hosts."""

    kind: int
    num_hosts: int
    num_devices: int

    @property
    def size(self) -> int:
        """The number of devices."""
        return self.num_hosts * self.num_devices


class Stage(NamedTuple):
    """Layers [start, end) on a mesh."""

    start: int
    end: int
    submesh: Submesh


class Price(NamedTuple):
    """Costs of some layers as a stage on a mesh; bytes are those of the fullest device.

    `seconds` are of a micro-batch's forward and backward; `stay_bytes` of weights, gradients and
    the optimizer; `microbatch_bytes` what each micro-batch in flight keeps; `handover_s` seconds
    to hand a micro-batch's values to the next stage and to get its gradients.
    """

    seconds: float
    stay_bytes: float
    microbatch_bytes: float
    handover_s: float = 0.0


class Task(NamedTuple):
    """A search for stages: the layers, the hosts, and the prices of stages on meshes.

    `prices(submesh)` are the fields of `Price` of layers [start, end) on it, [field, start, end];
    infinite for what cannot be.
    """

    num_layers: int
    hosts: Sequence[Hosts]
    prices: Callable[[Submesh], Numbers]
    num_microbatches: int


@lru_cache(maxsize=1)  # those of one task are searched in several ways
def _prices(task: Task, meshes: tuple[Submesh, ...]) -> Numbers:
    """Return the fields of prices [field, mesh, end, start]; what cannot be takes for ever."""
    found = np.stack([task.prices(mesh) for mesh in meshes], axis=1).swapaxes(2, 3)
    found[1:, ~np.isfinite(found[0])] = 0.0  # bytes of nothing
    return found


class StageTable:
    """Prices as arrays [mesh, end, start]: seconds with handing over as `total`, and the time
    between micro-batches as `pace`, which is infinite for what does not fit.
    """

    def __init__(self, task: Task, meshes: Sequence[Submesh], num_stages: int, ahead: int) -> None:
        num_layers, hosts, _, num_microbatches = task
        self.num_layers, self.num_stages, self.ahead = num_layers, num_stages, ahead
        self.hosts, self.meshes = hosts, meshes
        self.devices = tuple(host.num_hosts * host.num_devices for host in hosts)
        self.sizes = np.zeros((len(meshes), len(hosts)), dtype=int)
        """Devices of each kind that a mesh uses."""
        for size, mesh in zip(self.sizes, meshes, strict=True):
            size[mesh.kind] = mesh.size
        self.may_be_next = self._host_by_host()
        """By the devices left of each kind, whether the next stage may have a mesh."""
        prices = _prices(task._replace(hosts=tuple(hosts)), tuple(meshes)).copy()
        prices[3, :, num_layers] = 0.0  # no stage comes after the last layer
        seconds, self.stay, self.kept, handover = prices
        self.total = seconds + handover
        self.pace = np.maximum(seconds, self.total / ahead)
        self.memory = np.array([hosts[mesh.kind].memory_bytes for mesh in meshes])
        self.most_in_flight = num_microbatches
        room = self.memory[:, None, None] - self.stay
        many = np.full_like(room, inf)
        np.divide(room, self.kept, out=many, where=self.kept > 0)
        many[many >= self.most_in_flight] = inf
        self.deepest = np.where(room < 0, 0, np.floor((many - 1) / ahead) + 1)
        """How many stages there may be from this one to the last."""
        self.pace[self.deepest < 1] = inf

    def _host_by_host(self) -> Numbers:
        """Return which meshes may be next [mesh, devices left of each kind], so that stages fill
        one host after the other: parts of a host only while it has room, whole hosts only at the
        start of one, and another kind of hosts only once no host is in part used.
        """
        may_be_next = np.ones((len(self.meshes), *(n + 1 for n in self.devices)), dtype=bool)
        left = np.indices(may_be_next.shape[1:])
        sizes = [host.num_devices for host in self.hosts]
        is_whole = [here % whole == 0 for here, whole in zip(left, sizes, strict=True)]
        for may, (kind, num_hosts, number) in zip(may_be_next, self.meshes, strict=True):
            room = (left[kind] - 1) % sizes[kind] + 1
            may &= (left[kind] >= num_hosts * number) & (room >= number)
            for other in is_whole[:kind] + is_whole[kind + 1 :]:
                may &= other
        return may_be_next

    def within(self, bound_s: float) -> Numbers:
        """Return `total`, infinite for what is slower than a bound."""
        return np.where(self.pace <= bound_s, self.total, inf)

    def least_seconds(self, total: Numbers, limit_s: float) -> Numbers:
        """Return F of the stages whose `total` is finite."""

        def cost(mesh: int, end: int, start: int, stages: Numbers) -> Numbers:
            deep = self.deepest[mesh, end, start:end, None]
            return np.where(deep >= stages, total[mesh, end, start:end, None], inf)

        return self._least(total, cost, np.add, limit_s)

    def least_excess(self) -> float:
        """Return the bytes that the fullest device lacks where that is least; infinite if there
        are no stages whatever the memory is.
        """
        can = np.where(np.isfinite(self.total), 0.0, inf)

        def excess(mesh: int, end: int, start: int, stages: Numbers) -> Numbers:
            at = mesh, end, slice(start, end), None
            in_flight = np.minimum((stages - 1) * self.ahead + 1, self.most_in_flight)
            need = self.stay[at] + in_flight * self.kept[at]
            found: Numbers = np.maximum(need - self.memory[mesh], 0.0) + can[at]
            return found

        alone = np.maximum(self.stay + self.kept - self.memory[:, None, None], 0.0)
        ceiling = float((self.stay + self.num_stages * self.ahead * self.kept).max())
        found, limit = inf, max(min(ceiling, float(self.memory.max())) / 64, 1.0)
        while found > limit:  # a low limit makes it fast
            limit = limit * 2 if limit < ceiling else inf
            low = np.where(alone <= limit, can, inf)
            least = self._least(low, excess, np.maximum, limit)
            at: Any = (0, slice(None), *self.devices)
            found = float(least[at].min())
        return found

    def _least(
        self,
        total: Numbers,
        cost: Callable[[int, int, int, Numbers], Numbers],
        join: Callable[[Numbers, Numbers], Numbers],
        limit: float = inf,
    ) -> Numbers:
        """Return F as [start, stages, devices left of each kind ...], of stages whose `total` is
        finite; infinite where all answers are above the limit, or need more devices than there
        are.  `cost(mesh, end, first start, stages)` is an array [start, stages].
        """
        num_layers = self.num_layers
        shape = (num_layers + 1, self.num_stages + 1, *(number + 1 for number in self.devices))
        least = np.full(shape, inf)
        least[num_layers, 0] = 0.0
        can = np.isfinite(total)
        first = np.where(can.any(axis=2), can.argmax(axis=2), num_layers)
        before_s, before = self.before(total)
        before = np.minimum.accumulate(before[::-1])[::-1]  # what any later start needs as well
        spare = (before if len(self.devices) == 1 else before * 0).astype(int)
        for end in range(num_layers, 0, -1):
            after = least[end]
            after[after + before_s[end] > limit] = inf
            box = _box(np.isfinite(after))
            if box is None or box[0].start == self.num_stages:
                continue
            stages = slice(box[0].start, min(box[0].stop, self.num_stages))
            then = np.arange(stages.start + 1, stages.stop + 1)
            low = [along.start for along in box[1:]]
            starts = first[:, end]
            highs = np.array(shape[2:]) - self.sizes - spare[starts, None]
            for mesh in np.flatnonzero((starts < end) & (highs > low).all(axis=1)).tolist():
                start, size, high = int(starts[mesh]), self.sizes[mesh].tolist(), highs[mesh]
                old = tuple(slice(a, int(b)) for a, b in zip(low, high, strict=True))
                new = tuple(slice(x.start + n, x.stop + n) for x, n in zip(old, size, strict=True))
                here = least[(slice(start, end), slice(then[0], then[-1] + 1), *new)]
                costs = cost(mesh, end, start, then).reshape(
                    -1, len(then), *(1 for _ in self.devices)
                )
                joined = join(costs, after[(stages, *old)])
                at: Any = (mesh, *new)
                np.minimum(here, joined, out=here, where=self.may_be_next[at])
        return least

    def before(self, total: Numbers) -> tuple[Numbers, Numbers]:
        """Return the least seconds, and the fewest devices, of all layers before each."""
        sizes = np.where(np.isfinite(total), self.sizes.sum(axis=1)[:, None, None], _MANY)
        found = []
        for each in (total.min(axis=0), sizes.min(axis=0)):
            least = np.zeros(len(each))
            for end in range(1, len(each)):
                least[end] = (least[:end] + each[end, :end]).min()
            found.append(least)
        return found[0], found[1]

    def num_needed(self, bound_s: float) -> float:
        """Return a number of devices, of all kinds together, with fewer of which stages that keep
        to a bound do not hold all layers.
        """
        deepest = np.where(self.pace <= bound_s, self.deepest, 0)
        size = self.sizes.sum(axis=1)[:, None, None]
        changes = set(np.unique(deepest))
        needed = np.append(np.full(self.num_layers, inf), 0.0)
        best, each = inf, needed
        for stages in range(1, self.num_stages + 1):
            if stages == 1 or stages - 1 in changes:
                each = np.where(deepest >= stages, size, inf).min(axis=0)
            needed = np.append((each + needed[:, None]).min(axis=0), inf)
            best = min(best, float(needed[0]))
        return best


def _box(where: Numbers) -> tuple[slice, ...] | None:
    """Return the smallest slices that hold all that is true, None for nothing."""
    found = []
    for axis in range(where.ndim):
        others = tuple(n for n in range(where.ndim) if n != axis)
        along = np.flatnonzero(where.any(axis=others))
        if not len(along):
            return None
        found.append(slice(int(along[0]), int(along[-1]) + 1))
    return tuple(found)
