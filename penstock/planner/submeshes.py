"""Stages on sub-meshes of a cluster: which there may be, and the search for the best of them.

Alpa's inter-operator search (Zheng et al. 2022, section 5), on meshes of any number of devices:

    layers   0 ─ 1 ─ 2 │ 3 ─ 4 │ 5 ─ 6 ─ 7 ─ 8
    mesh       1 x 3   │ 1 x 1 │     2 x 4           of three hosts with 4 devices each

A stage needs memory for the micro-batches that 1F1B has in flight there: as many as stages follow,
and one.  It takes the fastest of its options that fits so many.  `stage_search` has the formula of
a step, and the dynamic program.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import accumulate
from math import inf
from typing import NamedTuple

import numpy as np

from penstock.costs.cluster import Cluster
from penstock.errors import ConfigError, PlanError
from penstock.trace.units import bytes_text
from penstock.types import Recompute, RecomputePolicy

from .stage_program import Block, Matrix, Stages
from .stage_search import Part, Search

MOST_STAGES = 64
"""The most stages of an answer."""
_LIGHT_BYTE_S = 1e-11
"""Seconds that a byte counts for where stages are to keep less."""


class Hosts(NamedTuple):
    """Hosts of one kind: their number, devices per host, and usable bytes per device."""

    num_hosts: int
    num_devices: int
    memory_bytes: float = inf


def hosts_of(cluster: Cluster) -> list[Hosts]:
    """Return the kinds of hosts of a cluster, as the search knows them."""
    return [
        Hosts(
            host.count,
            len(host.devices),
            min(cluster.devices[kind].memory_bytes for kind in host.devices),
        )
        for host in cluster.hosts
    ]


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


class MemoryPolicy(NamedTuple):
    """What a stage recomputes, and the price of a resident byte in seconds.

    With a `share` a search counts so much of the layers as recomputed one by one; in the end the
    fewest are that fit.  None: all are.
    """

    recompute: RecomputePolicy = Recompute.NEVER
    byte_s: float = 0.0
    share: float | None = None


MEMORY_POLICIES = (
    MemoryPolicy(),
    MemoryPolicy(byte_s=_LIGHT_BYTE_S),
    MemoryPolicy(Recompute.STAGE),
    MemoryPolicy(Recompute.STAGE, _LIGHT_BYTE_S),
    *(MemoryPolicy(Recompute.LAYERS, share=share) for share in (0.25, 0.5, 0.75, 1.0)),
)


class Option(NamedTuple):
    """How a stage is on its mesh: the lengths of the axes of its shards, and a memory policy."""

    shape: tuple[int, ...]
    policy: MemoryPolicy


class Stage(NamedTuple):
    """Layers [start, end) on a mesh."""

    start: int
    end: int
    submesh: Submesh


class Task(NamedTuple):
    """A search for stages: the layers, the hosts, and the prices of stages on meshes.

    `prices(submesh)` are five prices of layers [start, end) as a stage on a mesh, as [option,
    price, start, end], infinite for an impossible stage; bytes are those of the fullest device:

    - seconds of a micro-batch's forward and backward
    - bytes of weights, gradients and the optimizer
    - bytes that each micro-batch in flight keeps
    - seconds to hand a micro-batch's values to the next stage and to get its gradients
    - seconds of collectives that run once a step, after the stage's last backward
    """

    num_layers: int
    hosts: Sequence[Hosts]
    prices: Callable[[Submesh], Matrix]
    num_microbatches: int


@dataclass(frozen=True, slots=True)
class Answer:
    """Stages, the seconds of a step by the search's formula, and the devices of each stage."""

    stages: tuple[Stage, ...]
    seconds: float
    devices: tuple[tuple[int, ...], ...]


def submeshes(hosts: Sequence[Hosts]) -> list[Submesh]:
    """Return the meshes that a stage may have: any part of a host, and any number of hosts."""
    meshes = []
    for kind, (num_hosts, most, _) in enumerate(hosts):
        meshes += [Submesh(kind, 1, size) for size in range(1, most + 1)]
        meshes += [Submesh(kind, number, most) for number in range(2, num_hosts + 1)]
    return meshes


Shapes = Callable[[Submesh, Hosts], Sequence[tuple[int, ...]]]
"""Returns the lengths of axes along which a mesh's devices are arranged, for each shape that is
tried, by the hosts of its kind; nothing if no stage is to be on such a mesh.
"""


def every_shape(submesh: Submesh) -> list[tuple[int, ...]]:
    """Return the given shape of a mesh, or all that there are of one axis or two."""
    if submesh.shape:
        return [submesh.shape]
    count, inside = submesh.size, submesh.num_devices
    inners = (n for n in range(2, inside + 1) if count % n == inside % n == 0 and n < count)
    return [(count,), *((count // inner, inner) for inner in inners)]


def few_shapes(submesh: Submesh, hosts: Hosts) -> list[tuple[int, ...]]:
    """Return shapes of fewer meshes, for hosts or clusters of many devices.

    Parts of a host, and numbers of hosts, are powers of two or divide the whole: Alpa takes powers
    of two and whole hosts (section 5.2).  Of two axes the inner one is a power of two: the shorter
    one in a host, and the longest two that fit one, or all of it, on several.
    """
    number, most = submesh.num_devices, hosts.num_devices
    if submesh.num_hosts > 1:
        number, most = submesh.num_hosts, hosts.num_hosts
    is_taken = number & (number - 1) == 0 or most % number == 0
    if submesh.shape or submesh.num_devices == 1 or not is_taken:
        return every_shape(submesh) if is_taken else []
    size, inside = submesh.size, submesh.num_devices
    powers = [1 << n for n in range(1, inside.bit_length()) if inside % (1 << n) == 0]
    if submesh.num_hosts > 1:
        return [(size // n, n) for n in sorted({*powers, inside})[-2:]]
    return [(size,), *((size // n, n) for n in powers if n * n <= size)]


def shapes_within(
    sizes: tuple[int, int], shapes: Shapes, submesh: Submesh, hosts: Hosts
) -> Sequence[tuple[int, ...]]:
    """Return the shapes of a mesh that has the fewest to the most devices of these sizes."""
    fewest, most = sizes
    return shapes(submesh, hosts) if fewest <= submesh.size <= most else ()


def find_stages(
    task: Task, *, most: int = 8, eps: float = 0.01, ahead: int = 1, limit_s: float = inf
) -> list[Answer]:
    """Return at most `most` answers, best first, none slower than `limit_s`.

    A mesh has some devices of one host or several whole hosts, of any kind; devices may stay
    unused.  Kinds of hosts come in any order, and one host is filled before the next.

    A stage is `ahead` micro-batches ahead of the next: 1 in 1F1B, 2 in eager 1F1B.  The first of s
    stages keeps (s - 1) ahead + 1 micro-batches, at most B, and so many are on the way to the next
    stage and back at a time.

    Each answer takes at most a share `eps` longer than the optimum in its place; 0 is exact.
    There are at most `MOST_STAGES` stages.  24 layers on 256 devices take a tenth of a second at
    most, a hundred on 1,000 about 20 seconds; with two kinds of hosts every pair of numbers left
    is a state.

    Raises:
        ConfigError: a number is not positive.
        PlanError: nothing fits, and there is no limit; says what is missing.
    """
    if most < 1 or eps < 0:
        raise ConfigError(f"most={most} and eps={eps}; ask for at least 1, and at least 0")
    numbers = [task.num_layers, task.num_microbatches, len(task.hosts), ahead]
    numbers += [number for host in task.hosts for number in host[:2]]
    if min(numbers) < 1:
        raise ConfigError(
            f"{task.num_layers} layers, {task.num_microbatches} micro-batches, ahead={ahead} "
            f"and hosts {list(task.hosts)}; give at least 1 of each"
        )
    meshes = _Meshes(task, ahead)
    stages = meshes.stages(meshes.block, meshes.options)
    search = Search(stages, task.num_microbatches, most, eps, limit_s)
    search.run()
    if not search.best and limit_s == inf:
        lack = meshes.least_lack()
        if lack == inf:
            raise PlanError(
                "no stages are on these hosts: no price was given for the meshes they need"
            )
        raise PlanError(no_room(bytes_text(lack)))
    return [meshes.answer(parts, search.seconds_of[parts]) for parts in search.best]


def no_room(lack: str) -> str:
    """Return the words for stages of which the best lack bytes, so many in words."""
    return (
        f"no stages fit: those that need least lack {lack} on their fullest "
        "device; give more devices or memory, smaller micro-batches, or recompute"
    )


@lru_cache(maxsize=1)  # one task is searched several times, with and without a limit
def _prices(task: Task) -> tuple[list[Submesh], Matrix, Matrix]:
    """Return the meshes on which any stage can be, the cuts between which there are stages, and
    the prices as [field, option, mesh, end, start] by numbers of cuts.
    """
    meshes, tables = [], []
    for mesh in submeshes(task.hosts):
        own = task.prices(mesh)
        if np.isfinite(own[:, 0]).any():
            meshes.append(mesh)
            tables.append(own.swapaxes(0, 1))
    if not meshes:
        return [], np.array([0, task.num_layers]), np.empty((5, 1, 0, 2, 2))
    can_be = np.isfinite(np.array([own[0].min(axis=0) for own in tables])).any(axis=0)
    cuts = np.flatnonzero(np.append(can_be.any(axis=1), True) | can_be.any(axis=0))
    cuts = np.union1d(cuts, (0, task.num_layers))
    most = max(own.shape[1] for own in tables)
    found = np.full((5, most, len(meshes), len(cuts), len(cuts)), inf)
    for n, own in enumerate(tables):
        at = own[..., cuts[:-1, None], cuts].swapaxes(2, 3)
        found[:, : own.shape[1], n, :, :-1] = at
    found[1:, ~np.isfinite(found[0])] = 0.0  # so that sums of bytes stay finite
    return meshes, cuts, found


class _Meshes:
    """The prices of a task as costs of stages: `total` are seconds with the handover, and of the
    first stage its sums of gradients; `pace` the seconds between micro-batches.
    """

    def __init__(self, task: Task, ahead: int) -> None:
        # 1. Seconds of each stage by each option, as [option, mesh, end, start]; the option that
        #    takes least `charge` is taken.
        self.hosts, self.ahead = task.hosts, ahead
        self.meshes, self.cuts, prices = _prices(task._replace(hosts=tuple(task.hosts)))
        seconds, self.stay, self.kept, handover, once = prices.copy()
        handover[:, :, -1] = 0.0  # no stage comes after the last layer
        self.charge = seconds + once / task.num_microbatches
        self.total = seconds + handover
        self.pace = np.maximum(seconds, self.total / ahead)
        self.total[..., 0] += once[..., 0]  # the first stage ends last, and so do its sums
        # 2. The most stages from each on, with which it fits: each adds `ahead` micro-batches.
        self.memory = np.array([task.hosts[mesh.kind].memory_bytes for mesh in self.meshes])
        self.most_in_flight = task.num_microbatches
        room = self.memory[:, None, None] - self.stay
        many = np.full_like(room, inf)
        np.divide(room, self.kept, out=many, where=self.kept > 0)
        many[many >= self.most_in_flight] = inf
        self.deepest = np.where(room < 0, 0, np.floor((many - 1) / ahead) + 1)
        depths = np.unique(self.deepest[np.isfinite(self.charge)])
        # between two of these depths, stages have the same options
        self.depths, self._at_depth = depths[depths < inf], dict[int, Block]()
        # 3. The devices of each kind: how many there are, and how many a mesh uses.
        self.devices = tuple(host.num_hosts * host.num_devices for host in task.hosts)
        self.num_stages = min(task.num_layers, sum(self.devices), MOST_STAGES)

    def block(self, left: int) -> Block:
        """Return the costs of a stage that is the first of so many."""
        depth = int(np.searchsorted(self.depths, left))
        if depth not in self._at_depth:
            fits = self.deepest >= left
            options = np.where(fits, self.charge, inf).argmin(axis=0)[None]
            each = (np.where(fits, own, inf) for own in (self.pace, self.total))
            pace, total = (np.take_along_axis(own, options, axis=0)[0] for own in each)
            self._at_depth[depth] = Block(0, 0, pace, total)
        return self._at_depth[depth]

    @property
    def options(self) -> list[Block]:
        """The costs of stages by each option, where it fits the last stage of all."""
        fits = self.deepest >= 1
        pairs = zip(np.where(fits, self.pace, inf), np.where(fits, self.total, inf), strict=True)
        return [Block(0, 0, pace, total) for pace, total in pairs]

    def stages(self, block: Callable[[int], Block], options: Sequence[Block] = ()) -> Stages:
        """Return the stages that there may be, at some costs."""
        sizes = np.zeros((len(self.meshes), len(self.hosts)), dtype=int)
        for size, mesh in zip(sizes, self.meshes, strict=True):
            size[mesh.kind] = mesh.size
        return Stages(
            num_cuts=len(self.cuts) - 1,
            num_stages=self.num_stages,
            block=block,
            sizes=sizes,
            devices=self.devices,
            may_be_next=self._host_by_host(),
            options=options,
        )

    def _host_by_host(self) -> Matrix:
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

    def least_lack(self) -> float:
        """Return the least bytes that the fullest device lacks; infinite: no stages can be."""

        @cache
        def block(left: int) -> Block:
            in_flight = min((left - 1) * self.ahead + 1, self.most_in_flight)
            need = self.stay + in_flight * self.kept - self.memory[:, None, None]
            lacks = np.where(np.isfinite(self.total), need.clip(0), inf).min(axis=0)
            return Block(0, 0, lacks, lacks)

        return self.stages(block).slowest()

    def answer(self, parts: Sequence[Part], seconds: float) -> Answer:
        """Return the stages of an answer on their devices: the next unused ones of their kind."""
        firsts, stages, devices = [*accumulate(self.devices, initial=0)], [], []
        for part in parts:
            mesh = self.meshes[part.mesh]
            stages.append(Stage(int(self.cuts[part.start]), int(self.cuts[part.end]), mesh))
            first = firsts[mesh.kind]
            firsts[mesh.kind] += mesh.size
            devices.append(tuple(range(first, firsts[mesh.kind])))
        return Answer(tuple(stages), seconds, tuple(devices))
