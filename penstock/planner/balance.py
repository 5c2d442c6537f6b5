"""Choose the layers of each stage anew, by what the layers were measured to take."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, chain, pairwise

from penstock.schedules import ir
from penstock.schedules.passes import add_recompute
from penstock.types import Recompute, RecomputeLayers

from .partition import balance_spans
from .plan import BalancedBy, Plan


def balanced(
    plan: Plan, times_s: Sequence[tuple[float, float]], spans: Sequence[tuple[int, int]]
) -> Plan:
    """Return the plan whose slowest stage is as fast as it can be, with what that predicts.

    `times_s` are the seconds of each layer, forward and backward, for one micro-batch.  A layer
    costs a stage its backward, and its forward as often as the schedule runs that: a stage whose
    backward follows at once recomputes nothing, and has time for more layers.
    """
    costs_s = [
        [
            (forwards if _is_recomputed(plan, stage, layer) else 1) * forward_s + backward_s
            for layer, (forward_s, backward_s) in enumerate(times_s)
        ]
        for stage, forwards in enumerate(_forwards(plan))
    ]
    partition = balance_spans(costs_s, spans)
    bounds = pairwise(accumulate(partition, initial=0))
    predicted_s = tuple(
        sum(on_stage[start:end]) for on_stage, (start, end) in zip(costs_s, bounds, strict=True)
    )
    return replace(plan, partition=partition, balanced_by=BalancedBy.TIME, predicted_s=predicted_s)


def _is_recomputed(plan: Plan, stage: int, layer: int) -> bool:
    """Tell whether a layer would run as often as its stage does, if the stage had it."""
    policy = plan.recompute[stage]
    return not isinstance(policy, RecomputeLayers) or layer in policy.layers


def _forwards(plan: Plan) -> list[float]:
    """Say how often each stage runs a micro-batch forward, recomputed ones included."""
    schedule = plan.schedule(plan.num_stages, plan.num_microbatches)
    twice = [s for s, kind in enumerate(plan.recompute) if kind is not Recompute.NEVER]
    schedule = add_recompute(schedule, twice)
    programs = chain.from_iterable(schedule.programs)
    stages = Counter(i.stage for i in programs if isinstance(i, ir.Forward | ir.Recompute))
    return [stages[stage] / plan.num_microbatches for stage in range(plan.num_stages)]
