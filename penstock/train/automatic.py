"""Let a run plan itself when it starts, for the processes that there are: plan = "auto"."""

from dataclasses import replace
from typing import Any

import torch

from penstock.automatic.choose import MeshTask, plan_on_meshes
from penstock.automatic.hosts import check_devices, check_hosts
from penstock.automatic.measured import with_measured
from penstock.automatic.parallelize import mesh_task, this_cluster
from penstock.costs.cluster import Cluster
from penstock.errors import ConfigError
from penstock.mesh import Mesh
from penstock.mesh.init import join_mesh, meet
from penstock.mesh.start import num_processes
from penstock.model.capture.capture import resolve_layers
from penstock.model.pytree import tree_map
from penstock.planner.plan import Plan
from penstock.planner.wanted import Wanted
from penstock.recipe.recipe import Recipe
from penstock.runtime.devices import why_missing
from penstock.trace.progress import say
from penstock.trace.units import count_text

from .build import autocast, build_layers, build_model, lowered
from .layout import is_uneven, kind_of, make_mesh, with_plan
from .tasks import build_task
from .tasks.task import Task


def meet_by_plan(recipe: Recipe, plan: Plan | None) -> tuple[Recipe, Plan | None, Mesh]:
    """Let the processes of a run meet; where the recipe says so, rank 0 plans first, and the
    others wait however long that takes.

    Returns:
        The recipe with what the plan decides, the plan if there is one, and the mesh.

    Raises:
        RecipeError, PlanError, ConfigError: so many processes cannot run it, or nothing fits.
        MeshError: they do not find each other in time.
    """
    section, count = recipe.pipeline, num_processes()
    if plan is not None or not section.plan:
        return recipe, plan, make_mesh(recipe, plan)
    if count == 1:
        plan = _planned(recipe, count)
        recipe = with_plan(recipe, plan, is_own=True)
        return recipe, plan, make_mesh(recipe, plan)
    given = {"cluster": section.cluster, "num_microbatches": section.planned_microbatches}
    given["measure"] = section.measure
    world, place = meet(given, section.timeout_s, device_kind(recipe, None))
    with world.reporting():
        if (cluster := _cluster(recipe)) is not None:
            check_hosts(cluster, world, place)
        text = world.from_first(lambda: _planned(recipe, count).to_json(), "for rank 0 to plan")
    plan = Plan.from_json(text)
    return with_plan(recipe, plan, is_own=True), plan, join_mesh(world, plan.placement, place)


def device_kind(recipe: Recipe, plan: Plan | None) -> str | None:
    """Return what the processes of a run compute on; None: CPUs, or the plan has several kinds."""
    if plan is not None:
        return kind_of(plan) if is_uneven(plan.placement) else None
    if not recipe.pipeline.plan:
        return None
    cluster = _cluster(recipe)
    if cluster is None:
        return "cuda" if torch.cuda.is_available() else None
    kinds = {device.torch_type for device in cluster.devices.values()}
    return kinds.pop() if len(kinds) == 1 else None


def check_cluster(recipe: Recipe, count: int) -> None:
    """Refuse a cluster that is described, with another number of devices than of processes.

    Raises:
        ConfigError: says both; or there is no such cluster.
    """
    cluster = _cluster(recipe)
    if cluster is not None:
        check_devices(cluster, count)


def task_on(
    recipe: Recipe,
    task: Task,
    cluster: Cluster,
    sharding: str | None = None,
    *,
    num_microbatches: int | None,
    measure: bool = False,
) -> MeshTask:
    """Say what to plan for stages of a recipe's model on sub-meshes, without its weights; those
    are made where the recipe, or `measure`, asks for times of its layers.

    Raises:
        ConfigError: layers are to be measured, and nothing here is of the cluster's kind.
    """
    part, wanted = next(task.batches(0, 0, slice)).parts[0], recipe.pipeline.sharding
    with torch.device("meta"):
        model = task.make_model()
    layers = build_layers(model, task)
    inputs = lowered(recipe, model, part.inputs)
    ready = sharding or (wanted if isinstance(wanted, str) else "auto")
    if recipe.pipeline.plan and recipe.optimizer.name == "adafactor":
        ready = sharding or "data"  # it looks at whole weights
    found = mesh_task(layers, inputs, cluster, num_microbatches, ready)
    if ready == "auto" and recipe.train.average_decay:  # a process has to have all averages
        whole = [own for own in found.shardings if not Wanted(own).gathers]
        found = replace(found, shardings=whole)
    is_measured = measure or recipe.pipeline.measure
    return _measured(recipe, task, found, part.inputs) if is_measured else found


def _measured(recipe: Recipe, task: Task, planned: MeshTask, inputs: Any) -> MeshTask:
    """Let layers take as long as they do here, with values and in the recipe's precision."""
    kind = planned.cluster.device_of(0).torch_type
    if lacks := why_missing(kind):
        raise ConfigError(
            f"to measure layers for {planned.cluster.name}, they run on one of its devices, and "
            f"{lacks}; plan where there is one, or leave out pipeline.measure and --measure, by "
            "which seconds are estimated"
        )
    here = torch.device(kind)
    model = build_model(recipe, task).to(here)
    inputs = tree_map(lambda t: t.to(here), inputs)
    layers = resolve_layers(build_layers(model, task), inputs)
    own = with_measured(planned, layers, inputs, recipe.pipeline.threads_per_stage)

    def factors_of(num_microbatches: int) -> tuple[float, ...]:
        with autocast(recipe, here):
            return own.factors_of(num_microbatches)

    return replace(own, factors_of=factors_of)


def _planned(recipe: Recipe, count: int) -> Plan:
    section, cluster = recipe.pipeline, _cluster(recipe)
    if cluster is None:
        say("measuring this machine, to plan for it")
        cluster = this_cluster(count)
    say(f"planning for {cluster.name} ({count_text(count, 'device')})")
    number = section.planned_microbatches
    plan = plan_on_meshes(task_on(recipe, build_task(recipe), cluster, num_microbatches=number))
    return replace(
        plan,
        seed=section.seed,
        timeout_s=section.timeout_s,
        threads_per_stage=section.threads_per_stage,
    )


def _cluster(recipe: Recipe) -> Cluster | None:
    name = recipe.pipeline.cluster
    return Cluster.load(name) if name else None
