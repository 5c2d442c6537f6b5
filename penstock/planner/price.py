"""Prices of every run of layers on each stage of a pipeline: seconds, and bytes.

    seconds of its layers, as often as the schedule runs them, by the fastest option that fits
      + seconds in which messages at its two ends keep it from computing
    or the seconds of its messages on their links, if these are more and so set the pace

A run is [start, end), and a matrix has an entry for each; infinity does not fit.  A stage runs on
one device.  `search` cuts the model by these prices; the simulator then computes the step.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from penstock.costs.cluster import Route
from penstock.costs.records import LayerSeconds
from penstock.schedules.family import Family
from penstock.schedules.memory import num_versions
from penstock.types import Recompute, RecomputePolicy

from .cuts import EVERYWHERE, Setting, Window, between, upto
from .stage_bytes import StageBytes
from .stage_program import Matrix
from .stage_work import (
    Kinds,
    OnWay,
    StageWork,
    Tables,
    kinds_of,
    most_on_way,
    steady,
    work_of,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OnDevice:
    """A kind of device: seconds of each layer, usable memory, and the rate of offload."""

    seconds: Sequence[LayerSeconds]
    memory_bytes: float = np.inf
    host_bytes_per_s: float = np.inf


class Option(NamedTuple):
    """A memory option: which stages recompute, which offload, and the work that results."""

    recompute: tuple[RecomputePolicy, ...]
    work: tuple[StageWork, ...]
    offload: frozenset[int] = frozenset()


class Neighbours(NamedTuple):
    """The routes of messages to the stages before and after one; None if they cost nothing."""

    before: Route | None = None
    after: Route | None = None


def no_messages(setting: Setting) -> Neighbours:
    """Return a network on which messages are free."""
    return Neighbours()


@dataclass(frozen=True, kw_only=True)
class StagePrices:
    """Prices of a model for one schedule of one size.

    `devices` has an entry for each kind of device, and `kinds` the kind of each stage.  `lasting`
    are the bytes that each layer always keeps, `versioned` those of one older version of its
    weights.  `recompute` are the policies if they are decided; None: the cheapest that fits is
    chosen, and stages of `may_offload` may also offload.  `neighbours` has the routes of messages;
    with `room_for_messages` those on their way count as kept.  `windows` are the runs that each
    stage may have (see `cuts.windows`).
    """

    family: Family
    num_stages: int
    num_microbatches: int
    devices: Sequence[OnDevice]
    kinds: Sequence[int]
    of_stages: StageBytes
    lasting: Sequence[int]
    versioned: Sequence[int] | None = None
    recompute: tuple[RecomputePolicy, ...] | None = None
    may_offload: Collection[int] = ()
    neighbours: Callable[[Setting], Neighbours] = no_messages
    room_for_messages: bool = False
    windows: Sequence[Window] | None = None

    def least_s(self, stage: int) -> Matrix:
        """Return the seconds of a micro-batch by the fastest option that fits, or infinity."""
        window = self._window(stage)
        if not self._shares:
            return self.seconds(Setting(stage, self.kinds[stage]), window)
        key = "least", *(self._key(stage, option) for option in self._options)
        if key not in self._known:
            self._known[key] = self.seconds(Setting(stage, self.kinds[stage]))
        return self._known[key][window]

    def seconds(self, setting: Setting, window: Window = EVERYWHERE) -> Matrix:
        """Return these seconds in any setting, within a window of the matrix."""
        takes = (
            np.where(
                self._missing(setting, option, window) <= 0,
                self._without_limit(setting, option, window),
                np.inf,
            )
            for option in self._options
        )
        return reduce(np.minimum, takes)

    def if_all_fits_s(self, stage: int) -> Matrix:
        """Return the seconds of the option that recomputes least, whether it fits or not."""
        option, setting = self._first, Setting(stage, self.kinds[stage])
        work = option.work[stage]  # the same for stages that only keep more or less
        key = (
            *("all", self.kinds[stage], work.recomputes, work.wholes, work.halves),
            *(option.recompute[stage], self._ends(setting)),
        )
        if key not in self._known:
            self._known[key] = self._without_limit(setting, option, EVERYWHERE)
        return self._known[key][self._window(stage)]

    def all_fits(self, partition: Sequence[int]) -> bool:
        """Tell whether each stage of a partition fits without more recompute.

        If the fastest partition of `if_all_fits_s` does, no other partition is faster.
        """
        return all(
            (self._missing(Setting(n, self.kinds[n]), self._first, only(run)) <= 0).all()
            for n, run in enumerate(runs_of(partition))
        )

    def missing(self, stage: int) -> Matrix:
        """Return the bytes that each run lacks by the option that keeps least; 0 if it fits."""
        return self._least_missing(stage, self._window(stage))

    def missing_bytes(self, partition: Sequence[int]) -> float:
        """Return the most bytes that a stage of a partition lacks."""
        runs = enumerate(runs_of(partition))
        return max(float(self._least_missing(stage, only(run))[0, 0]) for stage, run in runs)

    @cached_property
    def stages_of_ranks(self) -> list[list[int]]:
        ranks = self.family.ranks(self.num_stages)
        stages_of: list[list[int]] = [[] for _ in range(1 + max(ranks))]
        for stage, rank in enumerate(ranks):
            stages_of[rank].append(stage)
        return stages_of

    @cached_property
    def _first(self) -> Option:
        """The option that was decided, or the one without recompute."""
        if self.recompute is None:
            return self._made((Recompute.NEVER,) * self.num_stages, frozenset())
        return self._made(self.recompute, frozenset(self.may_offload))

    @cached_property
    def _options(self) -> list[Option]:
        """The options, each keeps less: recompute nothing, recompute all, also offload."""
        if self.recompute is not None:
            return [self._first]
        whole = (Recompute.STAGE,) * self.num_stages
        moved = [self._made(whole, frozenset(self.may_offload))] if self.may_offload else []
        return [self._first, self._made(whole, frozenset()), *moved]

    def _made(self, recompute: tuple[RecomputePolicy, ...], away: frozenset[int]) -> Option:
        return Option(recompute, self.work_if(kinds_of(recompute, away)), away)

    def work_if(self, key: Kinds) -> tuple[StageWork, ...]:
        """Return the work of all stages if those of `key` recompute or offload."""
        if key not in self._works:
            size = self.num_stages, self.num_microbatches
            self._works[key] = work_of(self.family, *size, *key)
        return self._works[key]

    @cached_property
    def _works(self) -> dict[object, tuple[StageWork, ...]]:
        return {}

    @cached_property
    def _known(self) -> dict[object, Matrix]:
        return {}

    @cached_property
    def _shares(self) -> bool:
        """True if one table for each kind of stage is less work than a window for each stage."""
        stages = range(self.num_stages)
        if self.windows is None:
            return True
        areas = sum((a.stop - a.start) * (b.stop - b.start) for a, b in self.windows)
        kinds = {tuple(self._key(stage, x) for x in self._options) for stage in stages}
        return bool(areas > len(kinds) * (len(self.lasting) + 1) ** 2)

    def _window(self, stage: int) -> Window:
        return EVERYWHERE if self.windows is None else self.windows[stage]

    def _key(self, stage: int, option: Option) -> object:
        """Return a key that is equal for stages with the same prices by an option."""
        return (
            *(option.recompute[stage], option.work[stage], stage in option.offload),
            *(self.kinds[stage], self._num_beside[stage]),
            *(self._on_way[stage], self._versions[stage]),
            self._ends(Setting(stage, self.kinds[stage])),
        )

    def _ends(self, setting: Setting) -> object:
        """Return the figures of the links to both neighbours that decide a stage's prices."""
        routes = self.neighbours(setting)
        return tuple(
            None if x is None else (x.latency_s, x.bytes_per_s, x.overhead_s, x.blocks)
            for x in routes
        )

    @cached_property
    def _num_beside(self) -> dict[int, int]:
        """The number of stages that share the memory of each stage's rank."""
        return {n: len(stages) for stages in self.stages_of_ranks for n in stages}

    def _without_limit(self, setting: Setting, option: Option, window: Window) -> Matrix:
        """Return the seconds of an option, whether it fits or not."""
        device, stage = self.devices[setting.kind], setting.stage
        # 1. Its layers, and offload there and back: how much other work hides is not known.
        takes = between(self._upto(setting.kind, option, stage), window)
        if stage in option.offload and device.host_bytes_per_s < np.inf:
            takes = takes + 2 * self.of_stages.incoming.table[window] / device.host_bytes_per_s
        # 2. The overhead of each message that leaves, and of the one that comes back for it.
        amounts, routes = self.of_stages, self.neighbours(setting)
        pace: Matrix | float = 0.0
        for route, leaving in (
            (routes.after, amounts.sent),
            (routes.before, amounts.received_gradient),
        ):
            if route is not None:
                on_link = leaving.table[window] / route.bytes_per_s
                takes = takes + 2 * route.overhead_s
                if route.blocks:
                    takes = takes + route.latency_s + on_link
                pace = np.maximum(pace, on_link)
        # 3. A link that is busy for longer than the stage sets the pace.
        return np.maximum(takes, pace)

    def _upto(self, kind: int, option: Option, stage: int) -> Matrix:
        """Return the cached sums of seconds up to each layer, which many stages share."""
        work, policy = option.work[stage], option.recompute[stage]
        key = "upto", kind, work.recomputes, work.wholes, work.halves, policy
        if key not in self._known:
            self._known[key] = upto(work.seconds(self.devices[kind].seconds, policy))
        return self._known[key]

    def _least_missing(self, stage: int, window: Window) -> Matrix:
        setting = Setting(stage, self.kinds[stage])
        missing = (self._missing(setting, option, window) for option in self._options)
        least: Matrix = reduce(np.minimum, missing)
        return least.clip(0)

    def _missing(self, setting: Setting, option: Option, window: Window) -> Matrix:
        """Return the bytes that each run lacks by an option; negative if it fits."""
        stage, memory = setting.stage, self.devices[setting.kind].memory_bytes
        if memory == np.inf:
            return np.full((1, 1), -np.inf)
        amounts = self.of_stages
        tables = Tables(
            *(x.table for x in (amounts.graph, amounts.incoming, amounts.left, amounts.given))
        )
        kept = option.work[stage].peak_bytes(tables.within(window))
        lacks: Matrix = kept + self.used_bytes(stage, window) - memory / self._num_beside[stage]
        return lacks

    def used_bytes(self, stage: int, window: Window) -> Matrix:
        """Return the bytes of weights, their older versions, and messages on their way."""
        used = between(self._lasting, window)
        if self._versions[stage] > 1:
            used = used + (self._versions[stage] - 1) * between(self._of_version, window)
        if any(on_way := self._on_way[stage]):
            of_messages = self.of_stages.received.table, self.of_stages.sent_gradient.table
            used = used + sum(n * x[window] for n, x in zip(on_way, of_messages, strict=True))
        return used

    @cached_property
    def _versions(self) -> tuple[int, ...]:
        if self.versioned is None:
            return (1,) * self.num_stages
        return num_versions(steady(self.family, self.num_stages, self.num_microbatches))

    @cached_property
    def _on_way(self) -> list[OnWay]:
        if not self.room_for_messages:
            return [OnWay(0, 0)] * self.num_stages
        return most_on_way(self._first.work, self.num_microbatches)

    @cached_property
    def _lasting(self) -> Matrix:
        return upto(self.lasting)

    @cached_property
    def _of_version(self) -> Matrix:
        return upto(self.versioned or ())


def runs_of(partition: Sequence[int]) -> list[tuple[int, int]]:
    """Return the (start, end) of each stage's layers."""
    return list(pairwise(accumulate(partition, initial=0)))


def only(run: tuple[int, int]) -> Window:
    """Return the window of one run of layers."""
    return Window(*(slice(n, n + 1) for n in run))
