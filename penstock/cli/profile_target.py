"""Profile the model of a recipe."""

from collections.abc import Sequence, Sized
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from penstock.automatic.choose import MeshTask
from penstock.costs.cluster import Cluster
from penstock.costs.device import Device
from penstock.costs.layer_weights import layer_weights
from penstock.costs.profile import Profile
from penstock.errors import ConfigError
from penstock.model.capture.capture import resolve_layers
from penstock.model.pytree import tree_map
from penstock.recipe.data_sections import Text
from penstock.recipe.read import read_recipe
from penstock.recipe.recipe import Recipe
from penstock.runtime.devices import num_cores
from penstock.runtime.microbatches import microbatch_sizes
from penstock.runtime.profiling import profile
from penstock.trace.progress import say
from penstock.train.automatic import task_on
from penstock.train.build import autocast, build_layers, build_model, lowered, optimizer_maker
from penstock.train.tasks import build_task
from penstock.train.tasks.task import Task


def profile_of(
    path: Path,
    overrides: Sequence[str],
    sizes: Sequence[int],
    device: Device | None,
    *,
    busy: bool = False,
) -> Profile:
    """Measure the model of a recipe here, or count what it does on a device.

    Raises:
        ConfigError: the recipe is wrong, or its data are not there.
    """
    recipe = read_recipe(path, overrides)
    return _profile_of(recipe, _task_of(recipe), sizes, device, name=path.stem, busy=busy)


def _profile_of(
    recipe: Recipe,
    task: Task,
    sizes: Sequence[int],
    device: Device | None,
    *,
    name: str,
    busy: bool = False,
) -> Profile:
    part = next(task.batches(0, 0, slice)).parts[0]
    options: dict[str, Any] = {
        "targets": part.targets,
        "loss": task.loss,
        "microbatch_sizes": sizes or (_first_size(recipe, part.targets),),
        "optimizer": optimizer_maker(recipe),
        "threads": recipe.pipeline.threads_per_stage,
        "name": f"{name}, {recipe.train.precision}",
    }
    if device is not None:
        return _counted(recipe, task, part.inputs, device, options)
    here = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = build_model(recipe, task).to(here)
    inputs, targets = _moved((part.inputs, part.targets), here)
    layers = build_layers(model, task)
    with autocast(recipe, here):
        return profile(layers, inputs, busy=busy, **{**options, "targets": targets})


_LEAST_SIZES = (1, 4, 16, 64)
"""Micro-batches for which a plan's layers are profiled, beside the recipe's own."""


def profiles_for(
    path: Path, overrides: Sequence[str], sizes: Sequence[int], cluster: Cluster
) -> tuple[list[Profile], int]:
    """Profile the model of a recipe for a cluster; return how many samples a batch has, too.

    Layers are counted for accelerators.  On cores they are measured: with one thread for a rank,
    and with as many as there are cores here.

    Raises:
        ConfigError: the recipe is wrong, its data are not there, or the cluster has cores of
            another machine.
    """
    recipe = read_recipe(path, overrides)
    task = _task_of(recipe)
    batch_size = len(next(task.batches(0, 0, slice)).parts[0].targets)
    own = _first_size(recipe, range(batch_size))
    wanted = sizes or sorted({own, *(n for n in _LEAST_SIZES if n <= batch_size)})
    devices = cluster.devices.values()
    counted = [device for device in devices if device.torch_type != "cpu"]
    if counted:
        return [_profile_of(recipe, task, wanted, counted[0], name=path.stem)], batch_size
    cores = [name for name in cluster.devices if name != "core"]
    if cores:
        raise ConfigError(
            f"the cluster {cluster.name} has CPUs called {cores[0]!r}, and only those of this "
            'machine, "core", can be measured; give --profile with a profile that was made there'
        )
    threads = sorted({1, num_cores()})
    numbers = [f"pipeline.threads_per_stage={n}" for n in threads]
    recipes = [read_recipe(path, (*overrides, n)) for n in numbers]
    found = [_profile_of(r, task, wanted, None, name=path.stem, busy=True) for r in recipes]
    return found, batch_size


def task_of_meshes(
    path: Path,
    overrides: Sequence[str],
    cluster: Cluster,
    *,
    sharding: str | None,
    num_microbatches: int | None,
    measure: bool,
) -> MeshTask:
    """Say what to plan for stages of a recipe's model on sub-meshes, without its weights but to
    `measure` its layers.

    Raises:
        ConfigError: the recipe is wrong, or its data are not there; or layers are to be measured,
            and nothing here is of the cluster's kind.
    """
    recipe = read_recipe(path, overrides)
    number = num_microbatches or (
        recipe.pipeline.planned_microbatches if recipe.pipeline.plan else None
    )
    options: dict[str, Any] = {"num_microbatches": number, "measure": measure}
    return task_on(recipe, _task_of(recipe), cluster, sharding, **options)


def _task_of(recipe: Recipe) -> Task:
    """Read the data of a recipe; of a text that is not there, its shapes are enough."""
    data = recipe.data
    if not isinstance(data, Text) or Path(data.path).exists():
        return build_task(recipe)
    from penstock.train.tasks.language import LanguageTask

    task = LanguageTask(recipe, data, shapes_only=True)
    say(f"{data.path} does not exist: another text of its shape, with the recipe's vocabulary")
    return task


def _counted(
    recipe: Recipe, task: Task, inputs: Any, device: Device, options: dict[str, Any]
) -> Profile:
    """Count the layers without values; in lower precision, as if all of them had it."""
    with torch.device("meta"):
        model = task.make_model()
    layers = resolve_layers(build_layers(model, task), None)
    weights = layer_weights(layers, options["optimizer"])
    inputs = lowered(recipe, model, inputs)
    found = profile(layers, inputs, measure=False, torch_type=device.torch_type, **options)
    return replace(found, weights=weights)


def _first_size(recipe: Recipe, targets: Sized) -> int:
    """Return the samples of a run's first micro-batch."""
    share = recipe.pipeline.num_microbatches // recipe.pipeline.num_replicas
    return microbatch_sizes(len(targets) // recipe.pipeline.num_replicas, share)[0]


def _moved(value: Any, device: torch.device) -> Any:
    return tree_map(lambda tensor: tensor.to(device), value)
