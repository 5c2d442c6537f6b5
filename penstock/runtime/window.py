"""Run several mini-batches as one, with weight updates in between (asynchronous schedules)."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer, lr_scheduler

from penstock.errors import BatchError, ConfigError, StateError
from penstock.torch_private import note_steps

from .microbatches import Batch


@dataclass(frozen=True, slots=True)
class Window:
    """The weight updates within a run.

    Each update uses the gradients of `per_update` micro-batches, by the stage's optimizer.  `uses`
    counts, for each stage, the micro-batches that see each version of its weights.
    """

    per_update: int
    optimizers: "Mapping[int, StageOptimizer]"
    uses: Mapping[int, Counter[int]]

    def moving(self, stage: int) -> tuple[Sequence[Tensor], Collection[Tensor]]:
        """Return the parameters that a stage updates, and those of other stages here."""
        others = (o.parameters for at, o in self.optimizers.items() if at != stage)
        parameters = self.optimizers[stage].parameters
        moving = [p for p in parameters if p.requires_grad or p.grad is not None]
        return moving, frozenset(chain.from_iterable(others))


def joined(batches: Sequence[Batch], *, apart: bool) -> Batch:
    """Concatenate mini-batches; with `apart`, each micro-batch has the weight of a mini-batch.

    A BatchError refuses unlike numbers of micro-batches, and with `apart` a weight of 0.
    """
    counts = [len(batch.sizes) for batch in batches]
    if len(set(counts)) > 1:
        raise BatchError(
            f"the batches given to train_steps have {counts} micro-batches (a batch of fewer "
            "samples than micro-batches has one for each), and within one call all have as many; "
            "give the small ones to a call of their own"
        )
    weights = list(chain.from_iterable(batch.weights for batch in batches))
    # An update by one micro-batch uses its own mean, not its share of the mini-batch.
    if apart:
        if 0 in weights:
            raise BatchError(
                "the reduction function gave a micro-batch the weight 0, and with this schedule "
                "each one moves the weights by a mean of its own (is there a real token in it?)"
            )
        weights = [1.0] * len(weights)
    return replace(
        batches[0],
        sizes=list(chain.from_iterable(batch.sizes for batch in batches)),
        inputs=list(chain.from_iterable(batch.inputs for batch in batches)),
        targets=list(chain.from_iterable(batch.targets for batch in batches)),
        weights=weights,
    )


def changed_in_forward(stage: int) -> StateError:
    """Return the error for a layer that changes its weights in its forward."""
    return StateError(
        f"a layer of stage {stage} changed a weight in its own forward, as "
        "nn.Embedding(max_norm=...) does. With this schedule forwards see weights that updates "
        "have left behind, where the change would be lost. Load a checkpoint; leave that out, or "
        "use a synchronous schedule"
    )


Options = list[dict[str, Any]]
"""The options of each parameter group, such as the learning rate."""


def options_of_batches(optimizer: Optimizer, scheduler: Any, num_batches: int) -> list[Options]:
    """Return the options of each batch's updates; step the scheduler once after each batch.

    A ConfigError refuses optimizers that cannot update one stage alone, and metric schedulers.
    """
    _check(optimizer)
    refuse_metric(scheduler)
    options = []
    for _ in range(num_batches):
        options.append([_options(group) for group in optimizer.param_groups])
        if scheduler is not None:
            scheduler.step()
    return options


def refuse_metric(scheduler: Any) -> None:
    """Raise ConfigError for a scheduler that waits for a metric."""
    if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
        raise ConfigError(
            "lr_scheduler is a ReduceLROnPlateau, which waits for a metric, and train_steps calls "
            "its step() without one. Step it yourself between calls"
        )


def divided(
    optimizer: Optimizer, stages: Mapping[int, Collection[Tensor]], options: Sequence[Options]
) -> dict[int, "StageOptimizer"]:
    """Split an optimizer by stage; `options` are those of each update.

    The first of several stages that share a parameter updates it, and sends it to the others.  A
    ConfigError refuses parameters that are on no stage.
    """
    known = {p for parameters in stages.values() for p in parameters}
    held = [p for group in optimizer.param_groups for p in group["params"]]
    strangers = sum(p not in known and p.numel() > 0 for p in held)
    if strangers:
        raise ConfigError(
            f"{strangers} of the optimizer's {len(held)} parameters are on no stage here, so "
            "nothing says when they are to move. Make it of pipe.parameters()"
        )
    home = {p: stage for stage in sorted(stages, reverse=True) for p in stages[stage]}
    return {
        stage: StageOptimizer(optimizer, {p for p in stages[stage] if home[p] == stage}, options)
        for stage in stages
    }


def _check(optimizer: Optimizer) -> None:
    step = vars(optimizer).get("step")  # a scheduler puts a wrapper there, to count the steps
    globals_ = getattr(step, "__globals__", {})
    is_of_scheduler = globals_.get("__name__") == lr_scheduler.__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        reason = "it runs the model several times in a step, and looks at all weights at once"
    elif step is not None and not is_of_scheduler:
        reason = "its `step` was replaced on the object, and would be called stage by stage"
    elif note_steps(optimizer):
        reason = "it has step hooks, which would be called stage by stage"
    else:
        return
    raise ConfigError(
        f"train_steps with an asynchronous schedule lets each stage move its own weights at its "
        f"own time, which this {type(optimizer).__name__} cannot: {reason}. Use an optimizer that "
        "treats each parameter by itself, as SGD and AdamW do, or a synchronous schedule"
    )


class StageOptimizer:
    """Updates the parameters of one stage as the user's optimizer would.

    optimizer ── groups: [a b c d]  state: {a, b, c, d}
      stage 0 ── groups: [a b]      the same state      both share all attributes with the
      stage 1 ── groups: [c d]      the same state      user's object, except their groups
    """

    def __init__(
        self, optimizer: Optimizer, parameters: Collection[Tensor], options: Sequence[Options]
    ) -> None:
        self._options = options
        groups = [
            group | {"params": [p for p in group["params"] if p in parameters]}
            for group in optimizer.param_groups
        ]
        attributes = vars(optimizer) | {"param_groups": groups}
        attributes.pop("step", None)  # a scheduler's, which counts the calls of the whole
        self._optimizer = object.__new__(type(optimizer))
        vars(self._optimizer).update(attributes)
        self.parameters = [p for g in self._optimizer.param_groups for p in g["params"]]

    def step(self, update: int) -> None:
        """Update the parameters with the options of an update; free their gradients.

        A ConfigError refuses an optimizer that changes its groups, which all stages share.
        """
        if not self.parameters:
            return
        # Schedulers set options of the whole optimizer: set those of this update first, and check
        # afterwards that the step left them alone.
        groups, options = self._optimizer.param_groups, self._options[update]
        for group, wanted in zip(groups, options, strict=True):
            group.update(wanted)
        kind = self.parameters[0].device.type
        casts = torch.is_autocast_enabled(kind)
        with torch.autocast(kind, enabled=False) if casts else nullcontext():
            self._optimizer.step()
        for group, wanted in zip(groups, options, strict=True):
            changed = [name for name in wanted if group[name] is not wanted[name]]
            if changed or len(group) != len(wanted) + 1:
                raise ConfigError(
                    f"a step of {type(self._optimizer).__name__} changes {changed or 'options'} "
                    "of its parameter groups, which are the same for all stages; these update at "
                    "their own times. Use an optimizer whose state is that of each parameter"
                )
        for parameter in self.parameters:
            parameter.grad = None


def _options(group: dict[str, Any]) -> dict[str, Any]:
    """Copy the options of a group; clone tensors, which schedulers change in place."""
    return {
        name: value.clone() if isinstance(value, Tensor) else value
        for name, value in group.items()
        if name != "params"
    }
