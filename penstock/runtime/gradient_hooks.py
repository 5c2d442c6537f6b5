"""Run hooks on gradients once per step, on sums over replicas and shards.

    backwards of a step     no hook runs: each gradient is a part of a sum
    sums are there          register_hook: gets the step's gradient, may return another
    added to `.grad`        register_post_accumulate_grad_hook: gets the parameter

Without replicas and shards hooks stay in place: autograd runs them for each micro-batch, as in the
unsplit model.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.errors import ConfigError
from penstock.model.layers import Layers
from penstock.planner.plan import Plan
from penstock.torch_private import gradient_hooks

from .shards.divided import Shards


class SummedHooks:
    """The hooks of some parameters in one step, removed until `run_found`."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        both = {p: gradient_hooks(p) for p in parameters}
        self._hooks = {p: hooks for p, (hooks, _) in both.items() if hooks}
        self.post_hooks = {p: post for p, (_, post) in both.items() if post}
        """The hooks that run after a gradient was added."""
        self._removed: list[tuple[dict[int, Any], dict[int, Any]]] = []

    @property
    def hooked(self) -> list[Tensor]:
        """The parameters that have hooks."""
        return [*{**self._hooks, **self.post_hooks}]

    def take(self) -> None:
        """Remove the hooks, so that autograd runs none."""
        for hooks in (*self._hooks.values(), *self.post_hooks.values()):
            self._removed.append((hooks, dict(hooks)))
            hooks.clear()

    def put_back(self) -> None:
        """Restore the removed hooks, ahead of hooks that were added since."""
        for hooks, before in self._removed:
            new = dict(hooks)
            hooks.clear()
            hooks.update(before | new)
        self._removed = []

    @torch.no_grad()
    def run_found(self) -> None:
        """Restore the hooks, and call each with the sum of the step's gradients."""
        self.put_back()
        for parameter, hooks in self._hooks.items():
            for hook in tuple(hooks.values()):  # a hook may remove itself
                if parameter.grad is not None:
                    other = hook(parameter.grad)
                    parameter.grad = parameter.grad if other is None else other

    @torch.no_grad()
    def run_added(self) -> None:
        """Call the hooks that run once the sums are in `.grad`."""
        for parameter, hooks in self.post_hooks.items():
            for hook in tuple(hooks.values()):
                if parameter.grad is not None:
                    hook(parameter)


def summed_hooks(
    parameters: Sequence[Tensor], shards: Shards, layers: Layers, plan: Plan
) -> SummedHooks:
    """Return the hooks of a step that need sums; ConfigError for a hook that cannot get them."""
    hooks = SummedHooks(parameters if shards.is_shared else ())
    for parameter in hooks.hooked:
        if why := _why_not(parameter, hooks, shards, plan):
            how = plan.schedule if plan.schedule.is_asynchronous else f"sharding={plan.sharding}"
            raise ConfigError(
                f"a hook on the gradient of {_name(parameter, layers)} cannot be run as in the "
                f"unsplit model with {how}: {why}. Remove the hook, and change `.grad` after "
                "train_step, before the optimizer steps (penstock.clip_grad_norm_ clips slices by "
                "the norm of the whole); or use replicas or sharding='data', which give hooks sums"
            )
    return hooks


def _why_not(parameter: Tensor, hooks: SummedHooks, shards: Shards, plan: Plan) -> str:
    if parameter in shards.cut_in_step:
        return "each process finds a slice of the gradient, and none has the whole"
    if parameter in shards.cut and parameter in hooks.post_hooks:
        return "it runs when `.grad` is there, of which each process keeps a slice"
    if plan.schedule.is_asynchronous:
        return "the schedule updates weights while it runs, from gradients that nobody waits for"
    return ""


def _name(parameter: Tensor, layers: Layers) -> str:
    for prefix, module in layers.holders():
        for name, other in module.named_parameters():
            if other is parameter:
                return f"parameter {prefix + name!r}"
    return "a parameter of the loss"
