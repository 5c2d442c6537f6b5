"""Choose the layers of each stage anew, by what the layers were measured to take and to keep."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np

from penstock.costs.layer_facts import LayerBytes
from penstock.costs.profile import LayerSeconds
from penstock.schedules.versions import num_versions
from penstock.types import RecomputePolicy

from .cuts import Matrix
from .partition import Spans, cut, sums
from .plan import BalancedBy, Plan
from .stage_costs import fastest_that_fits, usual_ways
from .stage_work import StageWork, Tables, steady, work_of


def tables_of(of_layers: Sequence[LayerBytes]) -> Tables:
    """Return what each run of layers keeps; entries without layers mean nothing."""
    num_layers = len(of_layers)
    inner = sums([layer.inner for layer in of_layers])
    after = [layer.saved_inputs for layer in of_layers[1:]]
    between = [max(layer.saved_results, x) for layer, x in zip(of_layers, after, strict=False)]
    # values between layers: [start, end) has those that end before its last layer does
    values = np.zeros_like(inner)
    values[:-1, 1:] = sums(between)
    last = np.array([0, *(layer.saved_results for layer in of_layers)])
    last[num_layers] += of_layers[-1].results  # the loss saves about as much
    inputs = np.zeros_like(inner)
    inputs[:-1] = np.array([layer.inputs for layer in of_layers])[:, None]
    stays = np.zeros_like(inner)
    stays[0] = of_layers[0].inputs
    weights = sums([layer.left for layer in of_layers])
    return Tables(inputs + inner + values + last, inputs, weights, stays)


@dataclass(frozen=True, slots=True)
class LayerMemory:
    """What each layer keeps of a micro-batch, and its bytes of weights that an update moves."""

    kept: Sequence[LayerBytes]
    trainable_bytes: Sequence[int]


def balanced(
    plan: Plan,
    times_s: Sequence[tuple[float, float]],
    spans: Spans,
    memory: LayerMemory | None = None,
) -> Plan:
    """Return the plan whose slowest stage is as fast as it can be, with what that predicts.

    `times_s` are the seconds of each layer, forward and backward, for one micro-batch.  A layer
    costs a stage its backward, and its forward as often as the schedule runs that: a stage whose
    backward follows at once recomputes nothing, and has time for more layers.

    Where the plan limits memory and `memory` is given, a stage has no more layers than fit the
    limit of its rank: with nothing recomputed, or else with all of it, which then counts, or moved
    away as well.  Stages that share a rank are looked at one by one.  Where nothing fits, the
    limit does not count here.
    """
    seconds = [_seconds(*of_layer) for of_layer in times_s]
    cost = _cost(plan, seconds)
    partition = None
    if plan.memory_limit_bytes is not None and memory is not None:
        partition = cut(plan.num_stages, _cost_that_fits(plan, seconds, memory), spans)
    partition = partition or cut(plan.num_stages, cost, spans)
    assert partition is not None, "no layer takes for ever"
    found = replace(plan, partition=partition, balanced_by=BalancedBy.TIME)
    return replace(found, predicted_s=predicted_s(found, times_s))


def predicted_s(plan: Plan, times_s: Sequence[tuple[float, float]]) -> tuple[float, ...]:
    """Return the seconds of a micro-batch on each stage of the plan, forward and backward."""
    cost = _cost(plan, [_seconds(*of_layer) for of_layer in times_s])
    bounds = pairwise(accumulate(plan.partition, initial=0))
    return tuple(float(cost(stage)[bound]) for stage, bound in enumerate(bounds))


def _seconds(forward_s: float, backward_s: float) -> LayerSeconds:
    """Describe a layer whose recompute takes as long as its forward."""
    return LayerSeconds(
        forward_s=forward_s,
        recompute_s=forward_s,
        backward_s=backward_s,
        input_s=backward_s / 2,
        weight_s=backward_s / 2,
    )


def _cost(plan: Plan, seconds: Sequence[LayerSeconds]) -> Callable[[int], Matrix]:
    """Return what gives the seconds of any layers on a stage, as the plan has it recompute."""
    work = _work(plan, plan.recompute)
    return lambda stage: sums(work[stage].seconds(seconds, plan.recompute[stage]))


def _cost_that_fits(
    plan: Plan, seconds: Sequence[LayerSeconds], memory: LayerMemory
) -> Callable[[int], Matrix]:
    """Return what gives the seconds of any layers on a stage by the fastest way that fits."""
    assert plan.memory_limit_bytes is not None
    limits, tables = plan.memory_limit_bytes, tables_of(memory.kept)
    away = [stage for stage, moves in enumerate(plan.offload) if moves]
    ways = list(usual_ways(plan.schedule, plan.num_stages, plan.num_microbatches, away))
    trainable = sums(memory.trainable_bytes)
    older = num_versions(steady(plan.schedule, plan.num_stages, plan.num_microbatches))

    def takes(work: StageWork, policy: RecomputePolicy) -> Matrix:
        return sums(work.seconds(seconds, policy))

    def cost(stage: int) -> Matrix:
        room = limits[plan.placement.places[stage]] - (older[stage] - 1) * trainable
        return fastest_that_fits(stage, ways, takes, lambda policy: tables, room)

    return cost


def _work(
    plan: Plan, recompute: Sequence[RecomputePolicy], offload: Collection[int] = ()
) -> tuple[StageWork, ...]:
    return work_of(plan.schedule, plan.num_stages, plan.num_microbatches, recompute, offload)
