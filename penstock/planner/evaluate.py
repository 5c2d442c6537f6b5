"""What a candidate comes to: the best cut of the model for it, and what each stage computes twice
so that all fits.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, reduce
from itertools import accumulate, pairwise
from math import inf
from operator import le, mul

import numpy as np

from penstock.costs.cluster import Cluster
from penstock.costs.profile import Profile
from penstock.interval import likely
from penstock.schedules.family import Family
from penstock.types import Transport

from .candidates import Size, Wishes
from .cuts import EVERYWHERE, Matrix, Setting, Window, windows
from .foretell import Foretold
from .layer_seconds import bytes_of
from .partition import cut, sums
from .placement import Placement
from .plan import BalancedBy, Plan
from .pricing import Pricing
from .stage_bytes import StageBytes
from .stage_costs import OnDevice, StageCosts, Way, lasting_bytes, usual_ways
from .stage_work import OnWay, Tables, most_on_way, work_of


@dataclass(frozen=True, slots=True)
class Excess:
    """By how much a candidate does not fit: bytes on its fullest stage, and what there is."""

    num_bytes: float
    limit_bytes: float


_CLOSE_BYTES = 2**20
"""How well it is known how much more memory would do, before cuts are looked at."""


class Evaluator:
    """Makes plans of one profile for one cluster, whose figures are numbers; see `plan_of`."""

    def __init__(self, profile: Profile, cluster: Cluster, wishes: Wishes) -> None:
        self.profile, self.cluster, self.wishes = profile, cluster, wishes
        is_cpu = all(device.torch_type == "cpu" for device in cluster.devices.values())
        self.threads = profile.threads if is_cpu else 1  # an accelerator is a rank's alone
        self.pricing = Pricing(profile, cluster)
        self._least_bytes = cache(self._counted_least_bytes)

    def least_s(self, size: Size) -> float:
        """Return seconds that no plan of this size can take less than."""
        kinds = dict.fromkeys(self.cluster.places[p].kind for p in self.places_of(size))
        every = [self.pricing.seconds(kind, *self._each(size)) for kind in kinds]
        layers_s = [
            min(x.forward_s + min(x.backward_s, x.input_s + x.weight_s) for x in of_layer)
            for of_layer in zip(*every, strict=True)
        ]
        longest_s = max(sum(layers_s[start:end]) for start, end in self.profile.spans)
        return float(size.num_microbatches * max(longest_s, sum(layers_s) / size.num_ranks))

    def least_excess(self, size: Size) -> float:
        """Return bytes that no plan of this size lacks less than on its fullest stage."""
        each = self._least_bytes(self._each(size)[0])
        room = max(self.limits_of(size)) / size.stages_per_rank
        return max(sum(each) / size.num_stages, *each) - room

    def excess_of(self, size: Size, family: Family, *, with_messages: bool = False) -> Excess:
        """Return what is missing for a plan of this size, where that is least."""
        low, high = 0.0, float(sum(self._least_bytes(self._each(size)[0])))
        while high - low > _CLOSE_BYTES:
            middle = (low + high) / 2
            fits = self._windows(size, family, middle) is not None
            low, high = (low, middle) if fits else (middle, high)
        stages = _Stages(self, size, family, with_messages=with_messages)
        near = self._windows(size, family, high)
        assert near is not None, "there is room for all layers on each stage"
        starts = [*(window.starts.stop - 1 for window in near), len(self.profile.layers)]
        most = stages.missing_bytes([b - a for a, b in pairwise(starts)])  # no cut is worse
        stages.windows = self._windows(size, family, most)
        partition = cut(size.num_stages, stages.missing, self.profile.spans, stages.windows)
        assert partition is not None, "no cost is infinite"
        return Excess(stages.missing_bytes(partition), min(self.limits_of(size)))

    def fits(self, size: Size, foretold: Foretold) -> bool:
        """Tell whether a plan keeps within each rank's memory, messages on their way included:
        it does if as many come as ever can, else its timeline tells.
        """
        limits = self.limits_of(size)
        return all(map(le, most_bytes_of_ranks(foretold), limits)) or all(
            map(le, foretold.timeline.peak_bytes_of_ranks(), limits)
        )

    def plan_of(self, size: Size, family: Family, *, with_messages: bool = False) -> Plan | None:
        """Return the plan whose slowest stage is fastest, of all that fit; None if none does.

        What the schedule keeps has to fit; `with_messages`, as many messages on their way as there
        can be as well.

        Raises:
            ConfigError: something may fit, and the family makes no schedule of this size.
        """
        windows = self._windows(size, family)
        if windows is None:
            return None
        stages = _Stages(self, size, family, windows, with_messages=with_messages)
        spans = self.profile.spans
        partition = cut(size.num_stages, stages.if_all_fits_s, spans, windows)
        if partition is not None and not stages.fits(partition):
            partition = cut(size.num_stages, stages.least_s, spans, windows)
        if partition is None:
            return None
        runs = list(pairwise(accumulate(partition, initial=0)))
        chosen = [stages.choice(stage, run) for stage, run in enumerate(runs)]
        return Plan(
            layers=self.profile.layers,
            partition=partition,
            schedule=family,
            num_microbatches=size.num_microbatches,
            recompute=tuple(way.recompute[stage] for stage, way in enumerate(chosen)),
            offload=tuple(stage in way.offload for stage, way in enumerate(chosen)),
            placement=self._placement(size, family),
            threads_per_stage=self.threads,
            transport=self._transport(size),
            balanced_by=BalancedBy.TIME,
            predicted_s=tuple(stages.seconds(n, run) for n, run in enumerate(runs)),
            batch_size=self.wishes.batch_size,
            batch_norm_over_replicas=size.num_replicas > 1,  # as the unsplit model's
        )

    def places_of(self, size: Size) -> tuple[int, ...]:
        """Return the device of the cluster that each rank is on; one with several threads is on
        the first of its cores.
        """
        return tuple(n * self.threads for n in range(size.num_ranks * size.num_replicas))

    def limit_bytes(self, place: int) -> float:
        """Return what a rank on a device may use of its memory."""
        share = self.wishes.memory_share * self.threads
        return share * self.cluster.device_of(place).memory_bytes

    def limits_of(self, size: Size) -> tuple[float, ...]:
        """Return what each rank may use of its memory, on the replica that has least."""
        limits = [self.limit_bytes(place) for place in self.places_of(size)]
        return tuple(min(limits[rank :: size.num_ranks]) for rank in range(size.num_ranks))

    def on_device(self, size: Size, place: int, limit_bytes: float) -> OnDevice:
        """Return what a stage takes on a device, of whose memory its rank may use so much."""
        to_host = self.cluster.device_of(place).host_bytes_per_s
        return OnDevice(
            seconds=self.pricing.seconds(self.cluster.places[place].kind, *self._each(size)),
            memory_bytes=limit_bytes / size.stages_per_rank,
            host_bytes_per_s=inf if to_host is None else likely(to_host),
        )

    def may_offload(self, size: Size) -> bool:
        """Tell whether every device can move what a stage keeps to its host, and is allowed to."""
        devices = (self.cluster.device_of(place) for place in self.places_of(size))
        can = all(device.host_bytes_per_s is not None for device in devices)
        return self.wishes.offload and can

    def stage_bytes(self, size: Size, place: int) -> StageBytes:
        """Return what runs of layers keep of a micro-batch."""
        return self.pricing.bytes(self.cluster.places[place].kind, self._each(size)[0])

    def first_like(self, place: int) -> int:
        """Return the first device of the kind of a device."""
        return self._first_of[self.cluster.places[place].kind]

    @cached_property
    def _first_of(self) -> dict[str, int]:
        places = reversed(list(enumerate(self.cluster.places)))
        return {found.kind: number for number, found in places}

    def _counted_least_bytes(self, microbatch_size: int) -> list[int]:
        """Return what each layer keeps wherever it is: its weights, and for a backward at least
        what it saves inside.
        """
        at = bytes_of(self.pricing.prices(self.cluster.places[0].kind, microbatch_size))
        every = enumerate(self.profile.weights)
        return [lasting_bytes(weights) + at.layer(n).inner_bytes for n, weights in every]

    def _windows(self, size: Size, family: Family, more: float = 0.0) -> list[Window] | None:
        """Return what each stage may have in the memory there is and so many bytes more, if a
        layer keeps no more than it must; None if nothing fits even so.
        """
        of_ranks = self.limits_of(size)
        ranks = family.ranks(size.num_stages)
        limits = [of_ranks[rank] / size.stages_per_rank + more for rank in ranks]
        edges = [0, *(end for _, end in self.profile.spans)]
        return windows(self._least_bytes(self._each(size)[0]), limits, edges)

    def _each(self, size: Size) -> tuple[int, int]:
        return size.microbatch_size(self.wishes.batch_size), size.num_microbatches

    def _transport(self, size: Size) -> Transport:
        """Return how stages talk: in one process where that is a host of CPUs, else between."""
        if self.wishes.transport is not None:
            return self.wishes.transport
        on = self.places_of(size)
        if self.cluster.device_of(on[0]).torch_type != "cpu":
            return Transport.TORCH_DISTRIBUTED
        hosts = {self.cluster.places[place].host for place in on}
        return (
            Transport.THREADS
            if len(hosts) == size.num_replicas == 1
            else Transport.TORCH_DISTRIBUTED
        )

    def _placement(self, size: Size, family: Family) -> Placement:
        places, on = family.ranks(size.num_stages), self.places_of(size)
        kinds = [self.cluster.device_of(on[place]).torch_type for place in places]
        found = Placement.of(places, size.num_replicas, kinds)
        is_in_order = on == tuple(range(len(on)))
        return replace(found, cluster_places=None if is_in_order else on)


class _Stages:
    """What any run of layers costs each stage of one size in one schedule, in the windows that it
    may have.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        size: Size,
        family: Family,
        windows: Sequence[Window] | None = None,
        *,
        with_messages: bool = False,
    ) -> None:
        self._evaluator, self._size, self.windows = evaluator, size, windows
        on, limits = evaluator.places_of(size), evaluator.limits_of(size)
        ranks = family.ranks(size.num_stages)
        self._on = [(evaluator.first_like(on[p]), limits[p]) for p in ranks]
        moves = range(size.num_stages if evaluator.may_offload(size) else 0)
        self._to_come = usual_ways(family, size.num_stages, size.num_microbatches, moves)
        self._found = [next(self._to_come)]
        self._on_way = [OnWay(0, 0)] * size.num_stages
        if with_messages:
            self._on_way = most_on_way(self._found[0].work, size.num_microbatches)
        self._known: dict[object, Matrix] = {}
        self._known_s: dict[object, float] = {}
        self._costs_of: dict[object, StageCosts] = {}

    @property
    def _ways(self) -> list[Way]:
        """What stages may do, that which changes nothing first; the rest is asked for late."""
        self._found.extend(self._to_come)
        return self._found

    def if_all_fits_s(self, stage: int) -> Matrix:
        """Return the seconds where nothing is recomputed, whether that fits or not."""
        way = self._found[0]
        work = way.work[stage]  # the same for stages that only keep more or less
        key = work.recomputes, work.wholes, work.halves, self._on[stage]
        if key not in self._known:
            device = self._evaluator.on_device(self._size, *self._on[stage])
            self._known[key] = sums(work.seconds(device.seconds, way.recompute[stage]))
        return self._within(stage, self._known[key])

    def fits(self, partition: Sequence[int]) -> bool:
        """Tell whether a cut fits with nothing recomputed: no other one is faster then."""
        runs = enumerate(pairwise(accumulate(partition, initial=0)))
        way = self._found[0]
        return all(np.isfinite(self._run_s(stage, run, way)) for stage, run in runs)

    def least_s(self, stage: int) -> Matrix:
        """Return the seconds of the fastest way that fits; infinity where none does."""
        if not self._shares:
            window = self._window(stage)
            return reduce(np.minimum, [self._seconds(stage, x, window) for x in self._ways])
        key = self._keys(stage)
        if key not in self._known:
            found = [self._seconds(stage, x, EVERYWHERE) for x in self._ways]
            self._known[key] = reduce(np.minimum, found)
        return self._within(stage, self._known[key])

    def choice(self, stage: int, run: tuple[int, int]) -> Way:
        """Return the fastest way, the one that changes least of several."""
        if np.isfinite(self._run_s(stage, run, self._found[0])):
            return self._found[0]
        return min(self._ways, key=lambda way: self._run_s(stage, run, way))

    def seconds(self, stage: int, run: tuple[int, int]) -> float:
        """Return the seconds of a micro-batch on a stage with these layers."""
        return self._run_s(stage, run, self.choice(stage, run))

    def missing_bytes(self, partition: Sequence[int]) -> float:
        """Return what a cut is short of on the stage that is short of most."""
        runs = enumerate(pairwise(accumulate(partition, initial=0)))
        return max(float(self._missing(stage, _only(run))[0, 0]) for stage, run in runs)

    def missing(self, stage: int) -> Matrix:
        """Return the bytes that are missing, by the way that keeps least."""
        return self._missing(stage, self._window(stage))

    @cached_property
    def _shares(self) -> bool:
        """Whether it is less work to know all runs of stages that are alike than each one's."""
        windows = map(self._window, range(self._size.num_stages))
        areas = sum((a.stop - a.start) * (b.stop - b.start) for a, b in windows)
        num_kinds = len({self._keys(stage) for stage in range(self._size.num_stages)})
        return bool(areas > num_kinds * (len(self._evaluator.profile.layers) + 1) ** 2)

    def _window(self, stage: int) -> Window:
        assert self.windows is not None, "only single runs are asked for without"
        return self.windows[stage]

    def _within(self, stage: int, whole: Matrix) -> Matrix:
        found: Matrix = whole[self._window(stage)]
        return found

    def _run_s(self, stage: int, run: tuple[int, int], way: Way) -> float:
        key = self._key(stage, way), run
        if key not in self._known_s:
            self._known_s[key] = float(self._seconds(stage, way, _only(run))[0, 0])
        return self._known_s[key]

    def _seconds(self, stage: int, way: Way, window: Window) -> Matrix:
        return self._costs(stage, way)(Setting(stage, 0), window)

    def _keys(self, stage: int) -> object:
        return tuple(self._key(stage, way) for way in self._ways)

    def _key(self, stage: int, way: Way) -> object:
        """Return what stages have in common that cost the same by a way."""
        return way.recompute[stage], way.work[stage], self._on[stage], self._on_way[stage]

    def _missing(self, stage: int, window: Window) -> Matrix:
        at = Setting(stage, 0)
        ways = (self._costs(stage, way) for way in self._ways)
        found: Matrix = np.minimum.reduce([costs.missing_bytes(at, window) for costs in ways])
        return found.clip(0)

    def _costs(self, stage: int, way: Way) -> StageCosts:
        key = id(way), self._on[stage]
        if key not in self._costs_of:
            self._costs_of[key] = self._made_costs(*self._on[stage], way)
        return self._costs_of[key]

    def _made_costs(self, place: int, limit_bytes: float, way: Way) -> StageCosts:
        return StageCosts(
            of_stages=self._evaluator.stage_bytes(self._size, place),
            weights=self._evaluator.profile.weights,
            ways=(way,),
            devices=(self._evaluator.on_device(self._size, place, limit_bytes),),
            versions=(1,) * self._size.num_stages,
            on_way=self._on_way,
        )


def _only(run: tuple[int, int]) -> Window:
    """Return the window of one run of layers."""
    return Window(*(slice(n, n + 1) for n in run))


def most_bytes_of_ranks(foretold: Foretold) -> list[float]:
    """Return what each rank keeps at the very most, whatever the times: all of its stages at
    their fullest at once, and as many messages on their way as there can be.
    """
    plan, num_bytes = foretold.plan, foretold.sharing.num_bytes
    work = work_of(
        plan.schedule, plan.num_stages, plan.num_microbatches, plan.recompute, plan.offloading
    )
    arriving = [[0, 0] for _ in work]
    for (is_gradient, _, stage), size in num_bytes.items():
        arriving[stage][is_gradient] += size
    most = [0.0] * plan.placement.num_places
    for stage, on_way in enumerate(most_on_way(work, plan.num_microbatches)):
        kept, own = foretold.kept[stage], foretold.weights[stage]
        sizes = Tables(*map(np.array, (kept.graph, kept.inputs, kept.weights, kept.stays)))
        most[plan.placement.places[stage]] += (
            float(work[stage].peak_bytes(sizes))
            + (own.weight_bytes + own.gradient_bytes + own.optimizer_bytes)
            + sum(map(mul, on_way, arriving[stage]))
        )
    return most
