"""Balance the stages of a pipeline by measured times, within its memory limit."""

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

    `kept` is None without a memory limit.  `trainable_bytes` are those of each layer's trained
    weights; a shared weight counts in one layer.
    """

    seconds: Sequence[LayerSeconds]
    kept: AtSize | None = None
    trainable_bytes: Sequence[int] = ()


def balanced(plan: Plan, measured: Measured, spans: Spans) -> Plan:
    """Return the plan with the partition that is best by Alpa's formula (see `cuts`); a
    ConfigError says what is missing, and what would help.

    A partition that was given by hand stays.  A layer costs its backward, and its forward as often
    as the schedule runs that.  Under a memory limit the plan also gets the recompute and offload
    policies that fit.
    """
    # 1. Choose the partition.
    prices = _prices(plan, measured)
    if plan.balanced_by is not BalancedBy.HAND:
        partitions = best_cuts(prices, spans)
        if not partitions:
            # Nothing fits: cut without the limit, so that step 2 says which rank lacks how much.
            unlimited = replace(plan, memory_limit_bytes=None)
            partitions = best_cuts(_prices(unlimited, measured), spans)
        plan = replace(plan, partition=partitions[0], balanced_by=BalancedBy.TIME)
    # 2. Choose the policy by which each rank stays within its limit.
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
        # A partition by hand has no prediction.
        return plan
    return replace(plan, predicted_s=predicted_s(prices, plan.partition, policy))


def least_recompute(plan: Plan, measured: Measured, limits: Sequence[int]) -> Plan:
    """Return the plan with the cheapest recompute policy within each rank's bytes of activations.

    Where none fits, the plan stays as it is: the limits are estimates.
    """
    prices = _prices(replace(plan, memory_limit_bytes=tuple(limits)), measured)
    fitted = fit(prices, plan.partition)
    if isinstance(fitted, NoRoom):
        return plan
    return replace(
        plan,
        recompute=fitted.policy.recompute,
        predicted_peak_bytes=fitted.peak_bytes,
        predicted_s=predicted_s(prices, plan.partition, fitted.policy),
    )


def _prices(plan: Plan, measured: Measured) -> StagePrices:
    """Return the prices of all runs of layers on each stage of a plan."""
    limits = plan.memory_limit_bytes
    nothing = (0,) * len(measured.seconds)
    kept = measured.kept or AtSize(  # without a limit, no bytes were measured
        microbatch_size=1,
        kinds=(LayerKind(operators=(), inner_bytes=0, left_bytes=0),),
        kind_of=nothing,
        values=(),
        saved=((),) * len(nothing),
    )
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
        f"too few; with everything computed twice{' and moved away' if may_move else ''} it "
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
    texts = [
        f"{versions[s]} versions of {stage_bytes:,} bytes on stage {s}"
        for s, stage_bytes in zip(stages, weights, strict=True)
    ]
    rank = plan.placement.places[stages[0]]
    return (
        f"memory_limit_bytes={limit:,} on rank {rank}: {needed - limit:,} bytes too few for "
        f"weights alone; {plan.schedule!r} keeps {', '.join(texts)}, and all but the newest "
        "count. Use more and smaller stages, or a schedule with fewer versions (pipedream_2bw has "
        "two, one_f_one_b one)"
    )


def _that_fit(plan: Plan, measured: Measured) -> list[str]:
    """Name the synchronous schedules that fit the limit without moving a stage to another rank; an
    asynchronous one trains differently, so it has no replacement.
    """
    if plan.schedule.is_asynchronous:
        return []
    per_rank, names = plan.schedule.stages_per_rank, []
    for family in families_for(UNIT_COSTS, per_rank):
        is_twin = per_rank == 1 and dict(family.arguments).get("stages_per_rank") == 1
        if is_twin or family.ranks(plan.num_stages) != plan.placement.places:
            continue
        with suppress(ConfigError):  # the family has no schedule of this size
            prices = replace(_prices(plan, measured), family=family, versioned=None)
            if not isinstance(fit(prices, plan.partition), NoRoom):
                names.append(family.name)
    return names
