"""Build the model, the pipeline and the optimizer that a recipe names."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from penstock import (
    Layers,
    Mesh,
    Pipeline,
    Plan,
    Recompute,
    ShardingRequest,
    Target,
    capture,
)
from penstock.schedules import named_schedule
from penstock_recipes.optim import optimizers
from penstock_recipes.recipe.optimizer_sections import SGD, Adafactor, AdamW, RMSProp
from penstock_recipes.recipe.recipe import Recipe
from penstock_recipes.recipe.section import Section

from .tasks import build_task
from .tasks.task import Task


def build_model(recipe: Recipe, task: Task) -> nn.Module:
    """Build the model; its initial weights depend on train.seed only."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.train.seed)
        return task.make_model()


def build_layers(model: nn.Module, task: Task, *, check: bool = True) -> nn.Sequential | Layers:
    """Return the layers of a model: an nn.Sequential unchanged, any other model captured."""
    if isinstance(model, nn.Sequential):
        return model
    return capture(model, task.example(2), check=check)


def names_of(layers: nn.Sequential | Layers) -> list[str]:
    """Return the names of the layers."""
    if isinstance(layers, nn.Sequential):
        return [name for name, _ in layers.named_children()]
    return [step.name for step in layers]


def model_layers(recipe: Recipe) -> nn.Sequential | Layers:
    """Return the layers of a recipe's model on the meta device, without weights."""
    task = build_task(recipe)
    with torch.device("meta"):
        model = task.make_model()
    return build_layers(model, task, check=False)


def pipeline_options(recipe: Recipe) -> dict[str, Any]:
    """Return the arguments of `Pipeline` that the recipe sets."""
    section = recipe.pipeline
    auto, is_limited = section.partition == "auto", section.memory_limit_bytes is not None
    return {
        "num_stages": section.num_stages if auto else None,
        "partition": None if auto else section.partition,
        "num_microbatches": section.num_microbatches,
        "schedule": named_schedule(section.schedule, section.num_stages, section.stages_per_rank),
        "recompute": None if is_limited else Recompute(section.recompute),
        "memory_limit_bytes": section.memory_limit_bytes,
        "offload": section.offload,
        "seed": section.seed,
        "sharding": None if section.divides is None else section.divides.given,
        "threads_per_stage": section.threads_per_stage,
        "timeout_s": section.timeout_s,
    }


def target_of(recipe: Recipe, task: Task, name: str) -> Target:
    """Describe the recipe's model for planning, profiling and checking."""
    # The first part of the first batch is the example.
    section, part = recipe.pipeline, next(task.batches(0, 0, slice)).parts[0]
    return Target(
        name=name,
        make_model=partial(build_model, recipe, task),
        inputs=part.inputs,
        targets=part.targets,
        loss=task.loss,
        reduction=task.reduction,
        make_example=partial(task.example, 2),
        optimizer=optimizer_maker(recipe),
        precision=getattr(torch, recipe.train.precision),
        num_microbatches=section.num_microbatches,
        num_replicas=section.num_replicas,
        fixed_microbatches=section.planned_microbatches if section.plan else None,
        threads_per_stage=section.threads_per_stage,
        shardings=_shardings(recipe),
        measure=section.measure,
        options={} if section.plan else pipeline_options(recipe),
    )


def _shardings(recipe: Recipe) -> Sequence[str]:
    """Return the names of the sharding plans that the planner may use."""
    section = recipe.pipeline
    if section.plan and recipe.optimizer.name == "adafactor":
        return ("data",)  # the optimizer needs whole weights
    if isinstance(section.sharding, str) and section.sharding != "auto":
        return (section.sharding,)
    if recipe.train.average_decay:  # averages of sharded weights are not supported
        return [name for name in Target.shardings if not ShardingRequest(name).gathers]
    return Target.shardings


def build_pipeline(
    recipe: Recipe,
    task: Task,
    layers: nn.Sequential | Layers,
    example_inputs: Any,
    mesh: Mesh,
    plan: Plan | None,
) -> Pipeline:
    """Build the pipeline from a plan, or from the recipe; replicas share the micro-batches.

    Raises:
        PartitionError: the model has too few layers, or another number than the partition.
        PlanError: the plan is for another model, or for another number of processes.
    """
    options: dict[str, Any] = {"plan": plan}
    if plan is None:
        options = pipeline_options(recipe) | {"batch_norm_over_replicas": True}
        options["num_microbatches"] //= mesh.num_replicas
        if mesh.world_size == 1:
            options["devices"] = _devices(recipe)
    return Pipeline(
        layers,
        loss=task.loss,
        reduction=task.reduction,
        example_inputs=example_inputs,
        mesh=mesh,
        compile=recipe.pipeline.compile,
        **options,
    )


def _devices(recipe: Recipe) -> str | None:
    """Return the device of all stages of one process; None: each rank has an accelerator."""
    here = torch.accelerator.current_accelerator(check_available=True)
    given = recipe.pipeline.given_device
    return None if here is not None and here.type == given else given


def optimizer_maker(recipe: Recipe) -> Callable[..., torch.optim.Optimizer]:
    """Return a function that builds the recipe's optimizer from parameters."""
    section = recipe.optimizer
    options = section.options()
    if isinstance(section, AdamW):
        options["betas"] = (options.pop("beta1"), options.pop("beta2"))
    return partial(_OPTIMIZERS[type(section)], **options)


_OPTIMIZERS: Mapping[type[Section], Callable[..., torch.optim.Optimizer]] = {
    AdamW: torch.optim.AdamW,
    SGD: torch.optim.SGD,
    RMSProp: optimizers.RMSProp,
    Adafactor: optimizers.Adafactor,
}
"""The optimizer of each section, whose keys are its arguments."""


def parameter_groups(recipe: Recipe, pipe: Pipeline) -> list[dict[str, Any]]:
    """Return the parameter groups; RMSProp does not decay biases and weights of norms."""
    parameters = list(pipe.parameters())
    if not isinstance(recipe.optimizer, RMSProp):
        return [{"params": parameters}]
    return [
        {"params": [p for p in parameters if p.dim() > 1]},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


def autocast(recipe: Recipe, device: torch.device) -> torch.autocast:
    """Return the autocast context of a device for the recipe's precision."""
    precision: torch.dtype = getattr(torch, recipe.train.precision)
    is_lower = precision is not torch.float32
    return torch.autocast(device.type, precision if is_lower else torch.bfloat16, enabled=is_lower)
