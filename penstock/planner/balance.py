"""Cut the layers of a pipeline anew by what was measured, and keep what its ranks keep within a
limit of memory.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from penstock.costs.records import AtSize, LayerKind, LayerSeconds
from penstock.errors import ConfigError
from penstock.schedules.costs import UNIT_COSTS
from penstock.schedules.memory import num_versions
from penstock.schedules.names import families_for

from .cuts import Spans
from .fit import NoRoom, Policy, fit, predicted_s
from .plan import BalancedBy, Plan
from .price import OnDevice, StagePrices
from .search import best_cuts
from .stage_bytes import StageBytes
from .stage_work import steady


@dataclass(frozen=True, slots=True)
class Measured:
    """Measured seconds and bytes of the layers of a pipeline, for one micro-batch.

    `kept` is None where memory has no limit, `trainable_bytes` are those of each layer's weights
    that an update moves, each weight in one layer.
    """

    seconds: Sequence[LayerSeconds]
    kept: AtSize | None = None
    trainable_bytes: Sequence[int] = ()


def balanced(plan: Plan, measured: Measured, spans: Spans) -> Plan:
    """Return the plan whose cut is best by Alpa's formula (see `cuts`), with what that predicts;
    the layers of each stage are kept where they were given by hand.

    A layer costs a stage its backward, and its forward as often as the schedule runs that: a stage
    whose backward follows at once recomputes nothing, and has time for more layers.  Where the
    plan limits memory, what is recomputed is chosen by that, and what is moved away of the stages
    that may.

    Raises:
        ConfigError: nothing fits; says by how many bytes, on which rank, and what would help.
    """
    prices = _prices(plan, measured)
    if plan.balanced_by is not BalancedBy.HAND:
        partitions = best_cuts(prices, spans)
        if not partitions:  # what is missing is told of the cut without a limit
            unlimited = replace(plan, memory_limit_bytes=None)
            partitions = best_cuts(_prices(unlimited, measured), spans)
        plan = replace(plan, partition=partitions[0], balanced_by=BalancedBy.TIME)
    policy = Policy(plan.recompute, plan.offload)
    if plan.memory_limit_bytes is not None:
        fitted = fit(prices, plan.partition)
        if isinstance(fitted, NoRoom):
            raise ConfigError(_why_no_room(plan, fitted, measured))
        policy = fitted.policy
        plan = replace(
            plan,
            recompute=policy.recompute,
            offload=policy.offload,
            predicted_peak_bytes=fitted.peak_bytes,
        )
    if plan.balanced_by is BalancedBy.HAND:
        return plan
    return replace(plan, predicted_s=predicted_s(prices, plan.partition, policy))


def _prices(plan: Plan, measured: Measured) -> StagePrices:
    """Return what any run of layers costs each stage of a plan."""
    limits = plan.memory_limit_bytes
    nothing = (0,) * len(measured.seconds)
    kept = measured.kept or _keeping_nothing(len(measured.seconds))
    return StagePrices(
        family=plan.schedule,
        num_stages=plan.num_stages,
        num_microbatches=plan.num_microbatches,
        devices=[
            OnDevice(seconds=measured.seconds, memory_bytes=limit)
            for limit in (limits or [np.inf] * plan.placement.num_places)
        ],
        kinds=plan.placement.places,
        of_stages=StageBytes(kept, copies_weights=plan.transport.is_between_processes),
        lasting=nothing,
        versioned=measured.trainable_bytes or nothing,
        recompute=plan.recompute if limits is None else None,
        may_offload=sorted(plan.offloading),
    )


def _keeping_nothing(num_layers: int) -> AtSize:
    """Return layers of which nothing was looked at but their seconds."""
    return AtSize(
        microbatch_size=1,
        kinds=(LayerKind(operators=(), inner_bytes=0, left_bytes=0),),
        kind_of=(0,) * num_layers,
        values=(),
        saved=((),) * num_layers,
    )


def _why_no_room(plan: Plan, lacks: NoRoom, measured: Measured) -> str:
    """Say by how many bytes a rank has too little room, and what would help."""
    rank, limit = lacks.rank, round(lacks.limit_bytes)
    stages = [stage for stage, place in enumerate(plan.placement.places) if place == rank]
    of_versions, least = round(lacks.weight_bytes), round(lacks.least_bytes)
    if of_versions > limit:
        return _why_no_room_for_versions(plan, stages, limit, of_versions, measured)
    names = ", ".join(map(str, stages))
    may_move = all(plan.offload[stage] for stage in stages)
    versions = f" and {of_versions:,} in older versions of weights" if of_versions else ""
    others = _that_fit(plan, measured)
    return (
        f"memory_limit_bytes={limit:,} on rank {rank} (stage {names}): {least - limit:,} bytes "
        f"too few; with whole stages computed twice{' and moved away' if may_move else ''} it "
        f"still keeps {least - of_versions:,} of {plan.num_microbatches} micro-batches{versions}. "
        f"Give {'' if may_move else 'offload=True, '}more and smaller micro-batches, more stages"
        + (f", or a schedule that fits: {' or '.join(others)}" if others else "")
    )


def _why_no_room_for_versions(
    plan: Plan, stages: Sequence[int], limit: int, needed: int, measured: Measured
) -> str:
    versions = num_versions(steady(plan.schedule, plan.num_stages, plan.num_microbatches))
    ends = np.cumsum([0, *plan.partition])
    weights = [sum(measured.trainable_bytes[ends[s] : ends[s + 1]]) for s in stages]
    kept = [
        f"{versions[s]} versions of {own:,} bytes on stage {s}"
        for s, own in zip(stages, weights, strict=True)
    ]
    rank = plan.placement.places[stages[0]]
    return (
        f"memory_limit_bytes={limit:,} on rank {rank}: {needed - limit:,} bytes too few for "
        f"weights alone; {plan.schedule!r} keeps {', '.join(kept)}, and all but the newest count. "
        "Use more and smaller stages, or a schedule with fewer versions (pipedream_2bw has two, "
        "one_f_one_b one)"
    )


def _that_fit(plan: Plan, measured: Measured) -> list[str]:
    """Name the synchronous schedules that fit the limit with each stage on the rank it is on; none
    for one that updates weights while it runs, which computes something else.
    """
    if plan.schedule.is_asynchronous:
        return []
    per_rank, found = plan.schedule.stages_per_rank, []
    for family in families_for(UNIT_COSTS, per_rank):
        is_twin = per_rank == 1 and dict(family.arguments).get("stages_per_rank") == 1
        if is_twin or family.ranks(plan.num_stages) != plan.placement.places:
            continue
        with suppress(ConfigError):  # the family has no schedule of this size
            prices = replace(_prices(plan, measured), family=family, versioned=None)
            if not isinstance(fit(prices, plan.partition), NoRoom):
                found.append(family.name)
    return found
