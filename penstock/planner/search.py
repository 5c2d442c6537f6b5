"""Search for the cut of a model that is fastest by the prices of its stages, and fits: of a
pipeline whose size and schedule are decided, and of each candidate of a planner.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import pairwise
from math import inf, prod
from operator import le, mul
from statistics import median
from typing import Any, cast

import numpy as np

from penstock.costs.cluster import Cluster
from penstock.costs.profile import Profile
from penstock.costs.records import LayerSeconds
from penstock.schedules.family import Family
from penstock.schedules.one_f_one_b import one_f_one_b
from penstock.trace.progress import Count
from penstock.types import Recompute, Transport

from .bounds import Load, even_step_s, least_step_s
from .candidates import Constraints, Size
from .cuts import Setting, Spans, Window, cut_over_devices, cuts, windows
from .fit import Fitted, fit, predicted_s
from .placement import Placement
from .plan import BalancedBy, Plan
from .predict import Prediction
from .price import Neighbours, OnDevice, StagePrices, no_messages
from .pricing import Pricing
from .stage_work import Tables, most_on_way, work_of


def best_cuts(prices: StagePrices, spans: Spans) -> list[tuple[int, ...]]:
    """Return the layers per stage as `cuts`, with its errors, by the fastest option that fits."""
    shared = spans, prices.windows, prices.num_microbatches
    partitions = cuts(prices.num_stages, prices.if_all_fits_s, *shared)
    if all(map(prices.all_fits, partitions)):
        return partitions
    return cuts(prices.num_stages, prices.least_s, *shared)


@dataclass(frozen=True, slots=True)
class Excess:
    """By how much a candidate does not fit: bytes on its fullest stage, and what there is."""

    num_bytes: float
    limit_bytes: float


_MOST_STATES = 256
"""Numbers of devices of each kind in use, up to which all orders of unlike ones are searched."""
_UNEVEN = 2
"""The heaviest layers of an uneven model take more than so many times as long as the median."""
_CLOSE_BYTES = 2**20
"""Bisection tolerance for the missing memory, in bytes."""


class Evaluator:
    """Makes plans of one profile for one cluster, whose figures are numbers; see `plan_of`."""

    def __init__(self, profile: Profile, cluster: Cluster, constraints: Constraints) -> None:
        self.profile, self.cluster, self.constraints = profile, cluster, constraints
        is_cpu = all(device.torch_type == "cpu" for device in cluster.devices.values())
        self.threads = profile.threads if is_cpu else 1  # an accelerator is a rank's alone
        self.pricing = Pricing(profile, cluster)
        self._least_bytes = cache(self._counted_least_bytes)
        self.reordered = cache(self._reordered)
        self._predictions = Count("plans simulated, to find the fastest")

    def least_s(self, size: Size, *, in_any_order: bool = False) -> float:
        """Return seconds that no plan takes less than, on its devices or `in_any_order`."""
        own = dict.fromkeys(self.cluster.places[p].kind for p in self.places_of(size))
        kinds = self._counts if in_any_order else own
        every = [self.pricing.seconds(kind, *self._each(size)) for kind in kinds]
        layers_s = [
            min(x.forward_s + min(x.backward_s, x.input_s + x.weight_s) for x in of_layer)
            for of_layer in zip(*every, strict=True)
        ]
        longest_s = max(sum(layers_s[start:end]) for start, end in self.profile.spans)
        return even_step_s(sum(layers_s), longest_s, size.num_ranks, size.num_microbatches)

    def is_uneven(self, size: Size) -> bool:
        """Tell whether some layers that stay together take much longer than most do."""
        layers = self.layers_at(size, self.places_of(size)[0])
        spans_s = [
            sum(x.forward_s + x.backward_s for x in layers[start:end])
            for start, end in self.profile.spans
        ]
        return max(spans_s) > _UNEVEN * median(spans_s)

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
        prices = self.prices(size, family, None, with_messages=with_messages)
        near = self._windows(size, family, high)
        assert near is not None, "there is room for all layers on each stage"
        starts = [*(window.starts.stop - 1 for window in near), len(self.profile.layers)]
        most = prices.missing_bytes([b - a for a, b in pairwise(starts)])  # no cut is worse
        prices = replace(prices, windows=self._windows(size, family, most))
        partition, *_ = cuts(size.num_stages, prices.missing, self.profile.spans, prices.windows)
        return Excess(prices.missing_bytes(partition), min(self.limits_of(size)))

    def fits(self, size: Size, predicted: Prediction) -> bool:
        """Tell whether a plan keeps within each rank's memory, messages on their way included:
        it does if as many come as ever can, else its timeline tells.
        """
        limits = self.limits_of(size)
        return all(map(le, most_bytes_of_ranks(predicted), limits)) or all(
            map(le, predicted.timeline.peak_bytes_of_ranks(), limits)
        )

    def plan_of(self, size: Size, family: Family, *, with_messages: bool = False) -> Plan | None:
        """Return the plan whose cut is best by the formula, of all that fit, or that for the
        slowest stage where the simulator finds it faster; None if none fits.

        What the schedule keeps has to fit; `with_messages`, as many messages on their way as there
        can be as well.

        Raises:
            ConfigError: something may fit, and the family makes no schedule of this size.
        """
        windows = self._windows(size, family)
        if windows is None:
            return None
        prices = self.prices(size, family, windows, with_messages=with_messages)
        partitions = best_cuts(prices, self.profile.spans)
        plans = [self._fitted(size, prices, partition) for partition in partitions]
        fitting = [plan for plan in plans if plan is not None]
        if len(fitting) < 2:
            return next(iter(fitting), None)
        return min(fitting, key=lambda plan: self.predicted(plan).quick_step_s)

    def predicted(self, plan: Plan) -> Prediction:
        self._predictions.add()
        return Prediction(plan, self.profile, self.cluster, plan.batch_size, self.pricing)

    def plan_at(self, size: Size, family: Family, partition: tuple[int, ...]) -> Plan | None:
        """Return the plan with these layers on each stage; None if it does not fit."""
        return self._fitted(size, self.prices(size, family, None), partition)

    def draft(self, size: Size, family: Family, partition: tuple[int, ...]) -> Plan:
        """Return a plan that recomputes nothing and may not fit: no schedule is made for it."""
        return Plan(
            layers=self.profile.layers,
            partition=partition,
            schedule=family,
            num_microbatches=size.num_microbatches,
            recompute=(Recompute.NEVER,) * size.num_stages,
            placement=self._placement(size, family),
            threads_per_stage=self.threads,
            transport=self._transport(size),
            balanced_by=BalancedBy.TIME,
            batch_size=self.constraints.batch_size,
            batch_norm_over_replicas=size.num_replicas > 1,  # as the unsplit model's
        )

    def _fitted(self, size: Size, prices: StagePrices, partition: tuple[int, ...]) -> Plan | None:
        fitted = fit(prices, partition)
        if not isinstance(fitted, Fitted):
            return None
        policy = fitted.policy
        return replace(
            self.draft(size, prices.family, partition),
            recompute=policy.recompute,
            offload=policy.offload,
            predicted_s=predicted_s(prices, partition, policy),
        )

    def places_of(self, size: Size) -> tuple[int, ...]:
        """Return each rank's device; one with several threads is on the first of its cores."""
        return size.places or tuple(
            n * self.threads for n in range(size.num_ranks * size.num_replicas)
        )

    def may_reorder(self, size: Size) -> bool:
        """Tell whether `reordered` searches: not where devices are alike, or orders are many."""
        num_states = prod(count + 1 for count in self._counts.values())
        is_plain = size.num_replicas == size.stages_per_rank == self.threads == 1
        return len(self._counts) > 1 and num_states <= _MOST_STATES and is_plain

    def _reordered(self, size: Size) -> Size | None:
        """Return the size with its ranks on those devices, and in that order, that make the
        slowest stage of 1F1B fastest; None where these are those that it has.
        """
        every, counts = [place.kind for place in self.cluster.places], self._counts
        firsts = [self._first_of[kind] for kind in counts]
        in_order = self.prices(size, one_f_one_b, None)
        prices = replace(
            in_order,
            devices=[self._on_device(size, at, self.limit_bytes(at)) for at in firsts],
            neighbours=no_messages,
        )
        shared = self.profile.spans, size.num_microbatches
        found = cut_over_devices([*counts.values()], size.num_stages, prices.seconds, *shared)
        if found is None:
            return None
        names, taken = list(counts), Counter[str]()
        places = []
        for kind in (names[number] for number in found.kinds):
            of_kind = [n for n, each in enumerate(every) if each == kind]
            places.append(of_kind[taken[kind]])
            taken[kind] += 1
        anew = replace(size, places=tuple(places))
        return anew if anew.places != self.places_of(size) else None

    def layers_at(self, size: Size, place: int) -> Sequence[LayerSeconds]:
        """Return what the layers take on a device."""
        return self.pricing.seconds(self.cluster.places[place].kind, *self._each(size))

    def limit_bytes(self, place: int) -> float:
        """Return what a rank on a device may use of its memory."""
        share = self.constraints.memory_share * self.threads
        return share * self.cluster.device_of(place).memory_bytes

    def limits_of(self, size: Size) -> tuple[float, ...]:
        """Return what each rank may use of its memory, on the replica that has least."""
        limits = [self.limit_bytes(place) for place in self.places_of(size)]
        return tuple(min(limits[rank :: size.num_ranks]) for rank in range(size.num_ranks))

    def prices(
        self,
        size: Size,
        family: Family,
        windows: Sequence[Window] | None,
        *,
        with_messages: bool = False,
    ) -> StagePrices:
        """Return what any run of layers costs each stage."""
        ranks = family.ranks(size.num_stages)
        on, limits = self.places_of(size), self.limits_of(size)
        first_like = [self._first_of[self.cluster.places[place].kind] for place in on]
        kinds = list(dict.fromkeys(zip(first_like, limits, strict=False)))
        is_between = self._transport(size).is_between_processes
        cluster = self.pricing.between_processes if is_between else self.cluster

        def neighbours(at: Setting) -> Neighbours:
            own = on[ranks[at.stage]]
            before = on[ranks[at.stage - 1]] if at.stage else own
            after = on[ranks[at.stage + 1]] if at.stage + 1 < size.num_stages else own
            routes = (None if own == x else cluster.route(own, x) for x in (before, after))
            return Neighbours(*routes)

        return StagePrices(
            family=family,
            num_stages=size.num_stages,
            num_microbatches=size.num_microbatches,
            devices=[self._on_device(size, place, limit) for place, limit in kinds],
            kinds=[kinds.index((first_like[rank], limits[rank])) for rank in ranks],
            of_stages=self.pricing.bytes(
                *(self.cluster.places[0].kind, self._each(size)[0]), copies_weights=is_between
            ),
            lasting=[weights.total_bytes for weights in self.profile.weights],
            may_offload=range(size.num_stages if self.may_offload(size) else 0),
            neighbours=neighbours,
            room_for_messages=with_messages,
            windows=windows,
        )

    def _on_device(self, size: Size, place: int, limit_bytes: float) -> OnDevice:
        """Return what a stage takes on a device, of whose memory its rank may use so much."""
        to_host = self.cluster.device_of(place).host_bytes_per_s
        return OnDevice(
            seconds=self.pricing.seconds(self.cluster.places[place].kind, *self._each(size)),
            memory_bytes=limit_bytes,
            host_bytes_per_s=inf if to_host is None else to_host,
        )

    def may_offload(self, size: Size) -> bool:
        """Tell whether every device can move what a stage keeps to its host, and is allowed to."""
        devices = (self.cluster.device_of(place) for place in self.places_of(size))
        can = all(device.host_bytes_per_s is not None for device in devices)
        return self.constraints.offload and can

    @cached_property
    def _counts(self) -> Counter[str]:
        return Counter(place.kind for place in self.cluster.places)

    @cached_property
    def _first_of(self) -> dict[str, int]:
        places = reversed(list(enumerate(self.cluster.places)))
        return {found.kind: number for number, found in places}

    def _counted_least_bytes(self, microbatch_size: int) -> list[int]:
        """Return what each layer keeps anywhere: its weights, and what it saves inside."""
        at = self.pricing.prices(self.cluster.places[0].kind, microbatch_size)
        every = enumerate(self.profile.weights)
        return [weights.total_bytes + at.layer(n).inner_bytes for n, weights in every]

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
        return size.microbatch_size(self.constraints.batch_size), size.num_microbatches

    def _transport(self, size: Size) -> Transport:
        """Return how stages talk: in one process where that is a host of CPUs, else between."""
        if self.constraints.transport is not None:
            return self.constraints.transport
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


def most_bytes_of_ranks(predicted: Prediction) -> list[float]:
    """Return what each rank keeps at the very most, whatever the times: all of its stages at
    their fullest at once, and as many messages on their way as there can be.
    """
    plan, num_bytes = predicted.plan, predicted.sharing.num_bytes
    work = work_of(
        *(plan.schedule, plan.num_stages, plan.num_microbatches, plan.recomputing),
        *(plan.offloading, plan.by_layers),
    )
    arriving = [[0, 0] for _ in work]
    for (is_gradient, _, stage), size in num_bytes.items():
        arriving[stage][is_gradient] += size
    most = [0.0] * plan.placement.num_places
    for stage, on_way in enumerate(most_on_way(work, plan.num_microbatches)):
        kept, own = predicted.kept[stage], predicted.weights[stage]
        sizes = Tables(*map(np.array, (kept.graph, kept.inputs, kept.weights, kept.stays)))
        most[plan.placement.places[stage]] += (
            float(work[stage].peak_bytes(sizes))
            + (own.weight_bytes + own.gradient_bytes + own.optimizer_bytes)
            + sum(map(mul, on_way, arriving[stage]))
        )
    return most


def soonest_s(predicted: Prediction) -> float:
    """Return seconds that no schedule of a plan's size can take less than."""
    plan, costs = predicted.plan, predicted.costs
    per_stage = (costs.forward_s, costs.backward_s, costs.backward_input_s, plan.predicted_s)
    loads = []
    for stage, rank in enumerate(plan.placement.places):
        forward_s, whole_s, input_s, busy_s = (cast(Any, own)[stage] for own in per_stage)
        back_s = min(whole_s, input_s)
        loads.append(Load(rank, forward_s, back_s, forward_s + back_s, busy_s))
    return least_step_s(loads, plan.num_microbatches) + predicted.update_s
