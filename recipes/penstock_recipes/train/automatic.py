"""Plan a run with plan = "auto" when it starts, for the available processes."""

from dataclasses import replace

import torch

from penstock import Cluster, Constraints, Mesh, Plan, Transport, measure_cluster, plan_mesh
from penstock import plan as make_plan
from penstock.cli import say
from penstock.mesh import num_processes
from penstock.trace.units import count_text
from penstock_recipes.recipe.recipe import Recipe

from .build import target_of
from .layout import is_uneven, kind_of, make_mesh, with_plan
from .tasks import build_task


def meet_by_plan(recipe: Recipe, plan: Plan | None) -> tuple[Recipe, Plan | None, Mesh]:
    """Connect the processes of a run; with plan = "auto", rank 0 plans while the others wait.

    Returns:
        The recipe with the keys that the plan decides, the plan if there is one, and the mesh.

    Raises:
        RecipeError, PlanError, ConfigError: the number of processes is wrong, or no plan fits.
        MeshError: the processes do not find each other in time.
    """
    section, count = recipe.pipeline, num_processes()
    if plan is not None or not section.plan:
        return recipe, plan, make_mesh(recipe, plan)
    same = {"cluster": section.cluster, "num_microbatches": section.planned_microbatches}
    mesh, plan = plan_mesh(
        lambda: _planned(recipe, count),
        cluster=_cluster(recipe),
        same={**same, "measure": section.measure},
        timeout_s=section.timeout_s,
        device=device_kind(recipe, None),
    )
    return with_plan(recipe, plan, is_own=True), plan, mesh


def device_kind(recipe: Recipe, plan: Plan | None) -> str | None:
    """Return the device of a run; None if it is chosen later, or the plan has several kinds."""
    if plan is not None:
        return kind_of(plan) if is_uneven(plan.placement) else None
    if not recipe.pipeline.plan:
        return recipe.pipeline.given_device
    cluster = _cluster(recipe)
    if cluster is None:
        return "cuda" if torch.cuda.is_available() else None
    kinds = {device.torch_type for device in cluster.devices.values()}
    return kinds.pop() if len(kinds) == 1 else None


def check_cluster(recipe: Recipe, count: int) -> None:
    """Refuse a described cluster whose number of devices is not the number of processes.

    Raises:
        ConfigError: the numbers differ, or there is no such cluster.
    """
    cluster = _cluster(recipe)
    if cluster is not None:
        cluster.check_devices(count)


def _planned(recipe: Recipe, count: int) -> Plan:
    section, cluster = recipe.pipeline, _cluster(recipe)
    if cluster is None:
        say("measuring this machine, to plan for it")
        cluster = measure_cluster(count)
    say(f"planning for {cluster.name} ({count_text(count, 'device')})")
    target = target_of(recipe, build_task(recipe), "")
    transport = Transport.TORCH_DISTRIBUTED if count > 1 else None
    # a plan's micro-batches are those of each replica, and a run keeps to its number of all
    replicas = None if target.fixed_microbatches is None else 1
    asked = Constraints(batch_size=target.batch_size, num_replicas=replicas, transport=transport)
    plan = make_plan(target, cluster, constraints=asked, measure=section.measure)
    return replace(
        plan,
        seed=section.seed,
        timeout_s=section.timeout_s,
        threads_per_stage=section.threads_per_stage,
    )


def _cluster(recipe: Recipe) -> Cluster | None:
    name = recipe.pipeline.cluster
    return Cluster.load(name) if name else None
