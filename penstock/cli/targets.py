"""Find a command's TARGET: package.module:function, or a name that another package reads; and
measure its stages for `penstock simulate`.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from importlib.metadata import entry_points
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.automatic.target import Target
from penstock.costs.profile import Profile
from penstock.costs.records import LayerSeconds
from penstock.errors import ConfigError
from penstock.model.output_loss import loss_in
from penstock.model.pytree import flatten
from penstock.planner.cuts import balance_spans
from penstock.planner.predict import costs_of
from penstock.runtime.microbatches import microbatch_sizes
from penstock.schedules.costs import Costs
from penstock.schedules.family import Family
from penstock.schedules.ir import Schedule
from penstock.schedules.names import named_schedule

from .options import RECIPES_PACKAGE

_GROUP = "penstock.targets"
"""The group of entry points by which packages read targets."""
_DEFAULTS: Mapping[str, Any] = {
    "num_stages": 2,
    "stages_per_rank": None,
    "num_microbatches": 4,
    "schedule": "one_f_one_b",
    "recompute": "stage",
}
"""The options of a function's pipeline that the command line leaves open."""


def load_target(
    name: str,
    overrides: Sequence[str] = (),
    options: Mapping[str, Any] | None = None,
    *,
    needs_values: bool = False,
) -> Target:
    """Find the model that `name` means.

    Args:
        overrides: changes of a recipe, as "section.key=value".
        options: arguments of `Pipeline` from the command line; schedule and recompute by name.
        needs_values: whether the batch must hold real samples, not only their shapes.

    Raises:
        ConfigError: there is no such recipe, module or function, or it returns something else.
    """
    # 1. A colon names a function.
    if ":" in name:
        if overrides:
            raise ConfigError(f"--set {overrides[0]} changes a recipe, and {name} is a function")
        return _of_function(name, options or {})
    # 2. Other names are read by installed packages.
    readers = list(entry_points(group=_GROUP))
    for reader in readers:
        target: Target | None = reader.load()(name, overrides, options or {}, needs_values)
        if target is not None:
            return target
    hint = "" if readers else f" (recipes are read by {RECIPES_PACKAGE}, which is not installed)"
    raise ConfigError(f"cannot read {name!r}: give a function as package.module:function{hint}")


def _of_function(name: str, options: Mapping[str, Any]) -> Target:
    """Call the user's function and return the target it describes."""
    result = _find(name)()
    if isinstance(result, tuple) and len(result) in (2, 4):
        layers, *batch = result
        inputs, targets, loss = batch if len(batch) == 3 else (*batch, None, loss_of_all)
        result = Target.of(layers, inputs, targets, loss)
    if not isinstance(result, Target):
        kind = type(result).__name__
        described = f"a tuple of {len(result)}" if isinstance(result, tuple) else f"a {kind}"
        raise ConfigError(
            f"{name} returned {described}; return (layers, inputs, targets, loss), or "
            "(model, example_inputs), or a penstock.Target"
        )
    arguments = {**_DEFAULTS, **result.options, **options}
    number, per_rank = arguments["num_stages"], arguments.pop("stages_per_rank")
    arguments["schedule"] = named_schedule(arguments["schedule"], number, per_rank)
    return replace(result, name=name, options=arguments)


def loss_of_all(output: Any, _target: Any) -> Tensor:
    """Return the loss in the model's output, or else a number to which all outputs add."""
    loss = loss_in(output)
    if loss is not None:
        return loss
    parts = [leaf for leaf in flatten(output)[0] if leaf.requires_grad]
    if not parts:
        raise ConfigError(
            f"the model's output, a {type(output).__name__}, has no gradient; there is nothing to "
            "train: do all parameters have requires_grad=False, or does it run under no_grad?"
        )
    return torch.stack([part.abs().float().square().mean() for part in parts]).sum()


def _find(target: str) -> Callable[[], Any]:
    module_name, _, name = target.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)  # an installed command does not look where it is called
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there; what it imports is not
        raise ConfigError(
            f"there is no module {module_name!r} in {here} or among the installed ones"
        ) from None
    function = vars(module).get(name)
    if not callable(function):
        known = [n for n, f in vars(module).items() if getattr(f, "__module__", "") == module_name]
        raise ConfigError(
            f"{module_name} has no function {name!r}; it defines: {', '.join(known) or 'none'}"
        )
    result: Callable[[], Any] = function
    return result


def measured_schedule(target: Target, num_minibatches: int) -> tuple[Schedule, Costs]:
    """Measure a target's layers on a micro-batch, and add them up to its stages; a ConfigError if
    it leaves its stages to the planner, or has too few layers.

    Returns:
        The schedule of a replica, of so many mini-batches, and the measured costs of its stages.
    """
    options = target.options
    if not options:
        raise ConfigError(
            f"{target.name} leaves its stages to the planner; `penstock plan` predicts its steps"
        )
    # 1. Measure the layers on the largest micro-batch.
    num_microbatches = options["num_microbatches"]
    size = microbatch_sizes(target.batch_size, num_microbatches)[0]
    profile = target.profile([size])
    layers = _seconds(profile)
    # 2. Cut them into stages: as the target says, or balanced by time.
    partition = options.get("partition")
    if partition is None:
        times_s = [layer.forward_s + layer.backward_s for layer in layers]
        partition = balance_spans([times_s] * options["num_stages"], profile.spans)
    runs = [layers[a:b] for a, b in pairwise(accumulate(partition, initial=0))]
    costs = costs_of(runs)
    # 3. Make the schedule for these costs.
    given: Family = options["schedule"]
    family = named_schedule(given.name, len(runs), given.stages_per_rank, costs)
    return family(len(runs), num_microbatches // target.num_replicas, num_minibatches), costs


def _seconds(profile: Profile) -> list[LayerSeconds]:
    """Return the seconds of each layer; the loss is part of the last one."""
    (size,) = profile.sizes
    layers = [size.seconds(number) for number in range(len(profile.layers))]
    if size.loss is not None and size.loss.seconds is not None:
        layers[-1] = layers[-1].plus(size.loss.seconds)
    return layers
