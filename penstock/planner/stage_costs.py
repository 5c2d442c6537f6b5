"""What any run of layers costs as a stage: on its device, in its schedule, between its neighbours.

    seconds of its layers, as often as the schedule runs them, by the fastest way that fits
      + for how long messages keep it from computing
    or what its messages take on their links, if that is more: then these set the pace

Infinity is what does not fit the device.  These are the costs that `cut` and `cut_over_devices`
take; the simulator says what a step takes in the end.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np

from penstock.costs.cluster import Route
from penstock.costs.profile import LayerSeconds, LayerWeights
from penstock.schedules.family import Family
from penstock.types import Recompute, RecomputePolicy

from .cuts import EVERYWHERE, Matrix, Setting, Window
from .partition import between, upto
from .stage_bytes import StageBytes
from .stage_work import OnWay, StageWork, Tables, work_of


class Way(NamedTuple):
    """What each stage recomputes, which move what they keep away, and the work that this makes:
    one way to keep less.
    """

    recompute: tuple[RecomputePolicy, ...]
    work: tuple[StageWork, ...]
    offload: frozenset[int] = frozenset()


def usual_ways(
    family: Family, num_stages: int, num_microbatches: int, may_move: Collection[int]
) -> Iterator[Way]:
    """Yield what stages may do to keep less and less: nothing, recompute all, and move it away as
    well where they may.

    Raises:
        ConfigError: the family makes no schedule of such a size.
    """
    nothing: frozenset[int] = frozenset()
    usual = [(Recompute.NEVER, nothing), (Recompute.STAGE, nothing)]
    for policy, moved in (*usual, *([(Recompute.STAGE, frozenset(may_move))] if may_move else [])):
        each = (policy,) * num_stages
        yield Way(each, work_of(family, num_stages, num_microbatches, each, moved), moved)


def fastest_that_fits(
    stage: int,
    ways: Iterable[Way],
    takes: Callable[[StageWork, RecomputePolicy], Matrix],
    tables: Callable[[RecomputePolicy], Tables],
    room: Matrix,
) -> Matrix:
    """Return the seconds of any layers on a stage by the fastest way that keeps no more than there
    is `room` for, of what each `takes`; infinity where none does.
    """
    fastest = np.full(room.shape, np.inf)
    for way in ways:
        work, policy = way.work[stage], way.recompute[stage]
        fits = work.peak_bytes(tables(policy)) <= room
        np.minimum(fastest, np.where(fits, takes(work, policy), np.inf), out=fastest)
    return fastest


def lasting_bytes(weights: LayerWeights) -> int:
    """Return what is there of a layer's weights all the time."""
    of_updates = weights.gradient_bytes + weights.optimizer_bytes
    return weights.parameter_bytes + of_updates + weights.buffer_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class OnDevice:
    """A kind of device: the seconds of each layer there, what it has memory for, and how fast what
    is kept can be moved away and back.
    """

    seconds: Sequence[LayerSeconds]
    memory_bytes: float = np.inf
    host_bytes_per_s: float = np.inf


class RouteBetween(Protocol):
    """Says how values get from one kind of device to another."""

    def __call__(self, kind: int, other: int) -> Route: ...


@dataclass(frozen=True, kw_only=True)
class StageCosts:
    """What any run of layers costs in a setting: a function for `cut_over_devices`.

    `devices` has an entry for each kind, `versions` for each stage: how many versions of its
    weights the schedule keeps.  Weights, their gradients and what the optimizer keeps are there
    all the time.  With `route` messages count, where the setting names neighbours: all of them
    as if to the stages next to this one, also those that skip some.  It gives that part of
    the matrix that is within a window.  `on_way` is how many messages to each stage need room
    beside what it keeps; none if left out.
    """

    of_stages: StageBytes
    weights: Sequence[LayerWeights]
    ways: Sequence[Way]
    devices: Sequence[OnDevice]
    versions: Sequence[int]
    route: RouteBetween | None = None
    on_way: Sequence[OnWay] = ()

    def __call__(self, setting: Setting, window: Window = EVERYWHERE) -> Matrix:
        """Return the seconds of a micro-batch, [start, end)."""
        device = self.devices[setting.kind]

        def tables(policy: RecomputePolicy) -> Tables:
            return self.of_stages.tables(policy).within(window)

        def of_layers(work: StageWork, policy: RecomputePolicy) -> Matrix:
            return between(self._upto(setting.kind, work, policy), window)

        takes = fastest_that_fits(
            setting.stage, self.ways, of_layers, tables, self._room(setting, window)
        )
        moving = [way for way in self.ways if setting.stage in way.offload]
        if moving:  # there and back; how much of it other work hides is not known
            moved = 2 * tables(moving[0].recompute[setting.stage]).inputs
            takes = takes + moved / device.host_bytes_per_s
        if self.route is None:
            return takes
        own = self.of_stages
        sides = ((setting.after, own.sent), (setting.before, own.received_gradient))
        pace: Matrix = np.zeros_like(takes)
        for other, leaving in sides:
            if other is not None:
                route = self.route(setting.kind, other)
                on_link = leaving.table[window] / route.bytes_per_s
                takes = takes + 2 * route.overhead_s  # what leaves, and what comes back for it
                if route.blocks:
                    takes = takes + route.latency_s + on_link
                pace = np.maximum(pace, on_link)
        return np.maximum(takes, pace)

    def missing_bytes(self, setting: Setting, window: Window = EVERYWHERE) -> Matrix:
        """Return by how many bytes any layers keep too much, by the way that keeps least."""
        found: Matrix = np.minimum.reduce(
            [
                way.work[setting.stage].peak_bytes(
                    self.of_stages.tables(way.recompute[setting.stage]).within(window)
                )
                for way in self.ways
            ]
        )
        return found - self._room(setting, window)

    def _upto(self, kind: int, work: StageWork, policy: RecomputePolicy) -> Matrix:
        """Return the seconds of the first layers, looked up: much alike of many stages."""
        key = kind, work.recomputes, work.wholes, work.halves, policy
        if key not in self._known:
            self._known[key] = upto(work.seconds(self.devices[kind].seconds, policy))
        return self._known[key]

    @cached_property
    def _known(self) -> dict[object, Matrix]:
        return {}

    @cached_property
    def _lasting(self) -> Matrix:
        return upto([lasting_bytes(w) for w in self.weights])

    @cached_property
    def _of_version(self) -> Matrix:
        return upto([w.parameter_bytes for w in self.weights])

    def _room(self, setting: Setting, window: Window) -> Matrix:
        """Return the bytes that are left for what micro-batches keep."""
        older = (self.versions[setting.stage] - 1) * self._of_version
        used = between(self._lasting + older, window)
        room: Matrix = self.devices[setting.kind].memory_bytes - used
        if self.on_way and any(on_way := self.on_way[setting.stage]):
            of_messages = self.of_stages.received.table, self.of_stages.sent_gradient.table
            room = room - sum(n * x[window] for n, x in zip(on_way, of_messages, strict=True))
        return room
