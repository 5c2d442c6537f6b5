"""Train on several mini-batches as one run in which the schedule updates the weights."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from penstock.errors import BatchError, ConfigError, check_kind, shown
from penstock.model.pytree import flatten
from penstock.schedules.lower import Mode
from penstock.schedules.memory import uses_of_versions

from .engine import Engine
from .microbatches import Batch, Call
from .run import Run
from .stage.boundary import find_aliases
from .window import Window, divided, joined, options_of_batches, refuse_metric

Pair = tuple[Any, Any]
"""Inputs and targets."""


class WeightUpdater(NamedTuple):
    """The optimizer, and the scheduler that changes its options after each batch."""

    optimizer: Optimizer
    lr_scheduler: Any


def as_pairs(batches: Iterable[Pair]) -> list[Pair]:
    """Read all batches, each (inputs, targets); BatchError for anything else."""
    if not isinstance(batches, Iterable):
        raise BatchError(
            f"train_steps was given a {type(batches).__name__} as batches; give a list of "
            "(inputs, targets)"
        )
    pairs = list(batches)
    for n, batch in enumerate(pairs):
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            content = f"{len(batch)} values" if isinstance(batch, tuple | list) else "no pair"
            raise BatchError(
                f"batch {n} of train_steps, a {type(batch).__name__}, is {content}; give (inputs, "
                "targets) for each mini-batch, with None for targets that a loss does not need"
            )
    return pairs


def check_updating(updating: WeightUpdater, parameters: Iterable[Tensor]) -> None:
    """Check that the optimizer moves some of these parameters, and the scheduler its rates.

    The optimizer of a synchronous step may hold parameters of other models too.  A ConfigError
    refuses other types, and what belongs to another model or optimizer.
    """
    # Ranks whose stages are frozen have no parameters: any optimizer will do there.
    optimizer, scheduler = updating
    check_kind("optimizer", optimizer, Optimizer, "an optimizer of pipe.parameters()")
    held = {p for group in optimizer.param_groups for p in group["params"]}
    of_pipeline = set(parameters)
    if of_pipeline and held.isdisjoint(of_pipeline):
        raise ConfigError(
            f"none of the optimizer's {len(held)} parameters is one of the pipeline's here, so "
            "its steps would train nothing; make it of pipe.parameters()"
        )
    if scheduler is not None and not callable(getattr(scheduler, "step", None)):
        raise ConfigError(
            f"lr_scheduler={shown(scheduler)}; give a scheduler of the optimizer, such as "
            "torch.optim.lr_scheduler.StepLR(optimizer, ...), or leave it out"
        )
    if getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise ConfigError(
            f"lr_scheduler={shown(scheduler)} is of another optimizer, so the rates of the one "
            "that steps would never change; make it of the optimizer that train_steps is given"
        )


def train_one_by_one(
    train_step: Callable[..., Tensor], batches: Sequence[Pair], updating: WeightUpdater
) -> Tensor:
    """Take a synchronous step and an update for each batch."""
    _check_steps_alone(updating, len(batches))
    step_losses = []
    for inputs, targets in batches:
        step_losses.append(train_step(inputs, targets))
        updating.optimizer.step()
        updating.optimizer.zero_grad()
        if updating.lr_scheduler is not None:
            updating.lr_scheduler.step()
    return torch.stack(step_losses)


def _check_steps_alone(updating: WeightUpdater, num_batches: int) -> None:
    """Raise ConfigError without batches, or if an optimizer or scheduler cannot step() alone."""
    if not num_batches:
        raise ConfigError("train_steps was given no batches")
    if isinstance(updating.optimizer, LBFGS):
        raise ConfigError(
            "LBFGS runs the model several times in a step, by a closure, and train_steps calls "
            "optimizer.step() without one. Call optimizer.step(closure) yourself, with "
            "pipe.train_step in the closure, or use SGD or AdamW"
        )
    refuse_metric(updating.lr_scheduler)


def cut_all(engine: Engine, batches: Sequence[Pair], call: Call) -> list[Batch]:
    """Cut mini-batches into micro-batches, in the same way on all processes.

    A ConfigError refuses unlike numbers of batches, or none, inputs with grad, and replicas.
    """
    engine.mesh.world.require_same("train_steps", {"number of batches": len(batches)})
    if not batches:
        raise ConfigError("train_steps was given no batches")
    if engine.mesh.num_replicas > 1:
        raise ConfigError(
            f"{engine.plan.schedule!r} updates weights while it runs, and each update would have "
            f"to wait for the gradients of all {engine.mesh.num_replicas} replicas, which is not "
            "there. Use num_replicas=1, or a synchronous schedule"
        )
    for inputs, _ in batches:
        if any(leaf.requires_grad for leaf in flatten(inputs)[0]):
            raise ConfigError(
                "an input requires grad; train_steps computes no gradients of inputs. Give "
                "inputs.detach(), or use a synchronous schedule and train_step"
            )
    return [engine.splitter.cut(inputs, targets, call) for inputs, targets in batches]


def run_window(engine: Engine, cut: Sequence[Batch], step: int, updating: WeightUpdater) -> Run:
    """Run mini-batches as the steps from number `step` on, and update the weights."""
    # 1. Join the mini-batches, and read the options of all updates beforehand: the schedule
    #    overlaps updates of one batch with forwards of the next.
    family = engine.plan.schedule
    per_update = family.microbatches_per_update(len(cut[0].sizes))
    batch = joined(cut, apart=per_update < len(cut[0].sizes))
    options = options_of_batches(updating.optimizer, updating.lr_scheduler, len(cut))
    per_batch = len(cut[0].sizes) // per_update
    updates = [of_batch for of_batch in options for _ in range(per_batch)]
    parameters = {stage.index: stage.weights.owned.parameters for stage in engine.stages}
    optimizers = divided(updating.optimizer, parameters, updates)
    _check_apart(engine)

    # 2. Run them as one.
    run = engine.new_run(batch, "train", step, with_grad=True, num_minibatches=len(cut))
    # Autocast caches casts of weights; after an update they would be casts of older weights.
    autocasts = tuple(replace(mode, cache=False) for mode in run.caller.autocasts)
    run.caller = replace(run.caller, autocasts=autocasts)
    run.loss, run.loss_gradients = engine.loss, run.batch.weights
    uses = uses_of_versions(engine.program_of(run, Mode.TRAIN))
    run.window = Window(per_update, optimizers, uses)
    engine.drive(run, Mode.TRAIN)
    return run


def losses(engine: Engine, cut: Sequence[Batch], run: Run) -> Tensor:
    """Return the loss of each mini-batch, the same on every process."""
    sums, first = [], 0
    assert run.window is not None
    for batch in cut:
        size = len(batch.sizes)
        terms = {j: run.losses[first + j] for j in range(size) if run.losses}
        if run.window.per_update < size and terms:  # each was weighed as a mini-batch
            terms = {j: terms[j] * weight for j, weight in enumerate(batch.weights)}
        sums.append(engine.splitter.loss(terms))
        first += size
    return torch.stack(sums)


def _check_apart(engine: Engine) -> None:
    """Raise ConfigError if a parameter shares memory, so that it cannot move alone."""
    tensors = engine.tensors()
    if find_aliases({0: list(dict.fromkeys(tensors))}):
        raise ConfigError(
            "two parameters or buffers of the model share memory (a view, or an assigned .data), "
            "and with this schedule a weight has several versions, each with memory of its own. "
            "Let modules share the nn.Parameter itself, or use a synchronous schedule"
        )
