"""Divide the operators of each stage of a plan among the devices of its mesh."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from math import prod
from typing import Any

from penstock.costs.counting.graph import Graph
from penstock.sharding.costs import Costs
from penstock.sharding.plan import Sharding
from penstock.sharding.request import ShardingRequest
from penstock.types import Recompute

from .plan import Plan
from .stage_work import work_of


def sharding_of(
    plan: Plan, graph: Graph, names: Sequence[str], *, to_loss: bool = False
) -> Sharding:
    """Divide each layer among the ranks of its stage; `graph` is that of a micro-batch.  A pin
    that cannot be is a ConfigError, a layer that cannot be divided so a PlanError.

    With `to_loss` the output may leave the last layer in slices, which a loss takes.
    """
    assert plan.sharding is not None, "stages have several ranks"
    meshes = [plan.placement.shard_axes_of(stage) for stage in range(plan.num_stages)]
    number = plan.num_microbatches
    # micro-batches whose graph a stage keeps at one time: one if it recomputes all
    work = work_of(plan.schedule, plan.num_stages, number)
    whole = Recompute.STAGE, Recompute.LAYERS
    pairs = zip(plan.recompute, work, strict=True)
    num_kept = [1 if policy in whole else stage.most_kept for policy, stage in pairs]
    ends = [0, *accumulate(plan.partition)]
    stages = [range(a, b) for a, b in pairwise(ends)]
    costs = Costs.usual(max(meshes, key=prod), number)
    if plan.cluster is not None:
        costs = Costs(costs.mesh, plan.cluster, number)
    costs = replace(costs, factors=plan.layer_factors)
    of_stages = [
        replace(costs, mesh=m, num_in_flight=num_kept[n], devices=plan.devices_of(n))
        for n, m in enumerate(meshes)
    ]
    request, how = ShardingRequest.of(plan.sharding), {"stages": stages, "to_loss": to_loss}
    return divide(request, graph, names, of_stages, **how)


def divide(
    request: ShardingRequest,
    graph: Graph,
    names: Sequence[str],
    costs: Costs | Sequence[Costs],
    **how: Any,
) -> Sharding:
    """Divide the layers of a micro-batch's graph; `how` are more arguments of `plan_sharding`."""
    from penstock.sharding.stages import plan_sharding  # the solver takes a while to import

    how |= {"memory_limit_bytes": request.memory_limit_bytes, "pins": request.weights}
    return plan_sharding(request.plan, graph, names, costs, **how)
