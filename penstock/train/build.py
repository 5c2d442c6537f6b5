"""The words of a recipe turned into what they name: model, samples, pipeline, optimizer."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.data.digits import Split, load_digits
from penstock.mesh import Mesh
from penstock.pipeline import Pipeline
from penstock.scaler import GradScaler
from penstock.schedules.names import named_schedule
from penstock.types import Recompute
from penstock.zero import zero_optimizer
from penstock.zoo.residual import residual_network

from .recipe import SGD, AdamW, Recipe

NUM_CLASSES = 10


def build_model(recipe: Recipe) -> nn.Sequential:
    """Make the network; its initial weights depend on train.seed only."""
    section = recipe.model
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.train.seed)
        return residual_network(
            section.num_blocks, section.width, num_classes=NUM_CLASSES, dropout=section.dropout
        )


def build_data(recipe: Recipe) -> Split:
    """Read the samples."""
    return load_digits(recipe.data.test_share, recipe.data.seed)


def loss_function(outputs: Tensor, targets: Tensor) -> Tensor:
    """Give the mean cross entropy of (B, classes) against (B,)."""
    return F.cross_entropy(outputs, targets)


def pipeline_options(recipe: Recipe) -> dict[str, Any]:
    """Give the arguments of `Pipeline` that the recipe decides."""
    section = recipe.pipeline
    auto = section.partition == "auto"
    return {
        "num_stages": section.num_stages if auto else None,
        "partition": None if auto else section.partition,
        "num_microbatches": section.num_microbatches,
        "schedule": named_schedule(section.schedule, section.num_stages, section.stages_per_rank),
        "recompute": Recompute(section.recompute),
        "seed": section.seed,
        "threads_per_stage": section.threads_per_stage,
        "timeout_s": section.timeout_s,
    }


def build_pipeline(
    recipe: Recipe, model: nn.Sequential, example_inputs: Tensor, mesh: Mesh
) -> Pipeline:
    """Cut the model into stages; each replica of the mesh takes its share of the micro-batches.

    Raises:
        PartitionError: the model has too few layers, or another number than the partition says.
    """
    options = pipeline_options(recipe)
    options["num_microbatches"] //= mesh.num_replicas
    return Pipeline(
        model,
        loss=loss_function,
        example_inputs=example_inputs,
        mesh=mesh,
        batch_norm_over_replicas=True,
        **options,
    )


def build_optimizer(recipe: Recipe, pipe: Pipeline) -> torch.optim.Optimizer:
    """Make the optimizer over all parameters; the loop sets its learning rate in every step."""
    make: Callable[..., torch.optim.Optimizer]
    match recipe.optimizer:
        case AdamW() as o:
            make = partial(
                torch.optim.AdamW,
                lr=o.lr,
                betas=(o.beta1, o.beta2),
                eps=o.eps,
                weight_decay=o.weight_decay,
            )
        case SGD() as o:
            make = partial(
                torch.optim.SGD,
                lr=o.lr,
                momentum=o.momentum,
                nesterov=o.nesterov,
                weight_decay=o.weight_decay,
            )
    if recipe.pipeline.shard_optimizer:
        return zero_optimizer(pipe, make)
    return make(pipe.parameters())


def build_scaler(recipe: Recipe, pipe: Pipeline) -> GradScaler:
    """Make what scales the loss; it does nothing unless the precision needs it."""
    return GradScaler(pipe, enabled=recipe.train.precision == "float16")


def autocast(recipe: Recipe, pipe: Pipeline) -> torch.autocast:
    """Give the context in which the model runs at the recipe's precision."""
    precision: torch.dtype = getattr(torch, recipe.train.precision)
    is_lower = precision is not torch.float32
    return torch.autocast(
        pipe.devices[0].type, precision if is_lower else torch.bfloat16, enabled=is_lower
    )
