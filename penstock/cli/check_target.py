"""What `penstock check` is pointed at: a recipe, or a function named package.module:function."""

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.errors import ConfigError
from penstock.model.output_loss import loss_in
from penstock.model.pytree import flatten
from penstock.recipe.read import read_recipe
from penstock.schedules.names import least_stages_per_rank, named_schedule
from penstock.train.build import build_layers, build_model, pipeline_options
from penstock.train.tasks import build_task
from penstock.types import Recompute

CheckArguments = tuple[tuple[Any, Any, Any], dict[str, Any]]
"""(layers, inputs, targets) and the keyword arguments of `penstock.check`."""

_DEFAULTS: Mapping[str, Any] = {
    "num_stages": 2,
    "stages_per_rank": None,
    "num_microbatches": 4,
    "schedule": "gpipe",
    "recompute": "stage",
}


def load_target(
    target: str, given: Mapping[str, Any], changes: Sequence[str] = ()
) -> CheckArguments:
    """Find what `target` names; `given` are the options of the command line that were used.

    `changes` are of a recipe: "section.key=value".

    Raises:
        ConfigError: there is no such recipe, module or function, or it returns something else.
    """
    if ":" not in target:
        return _from_recipe(Path(target), given, changes)
    if changes:
        raise ConfigError(f"--set {changes[0]} changes a recipe, and {target} is a function")
    return _from_function(target, given)


def _from_recipe(path: Path, given: Mapping[str, Any], changes: Sequence[str]) -> CheckArguments:
    if path.suffix != ".toml":
        raise ConfigError(
            f"cannot check {str(path)!r}: give a recipe, a path that ends in .toml, or a function "
            "as package.module:function"
        )
    if "schedule" in given:
        given = {"stages_per_rank": least_stages_per_rank(given["schedule"]), **given}
    overrides = [*changes, *(f"pipeline.{key}={value}" for key, value in given.items())]
    if "num_stages" in given:
        overrides.append("pipeline.partition=auto")
    recipe = read_recipe(path, overrides)
    task = build_task(recipe)
    part = next(task.batches(0, 0, slice)).parts[0]
    options = pipeline_options(recipe) | {
        "loss": task.loss,
        "reduction": task.reduction,
        "example_inputs": part.inputs,
    }
    layers = build_layers(build_model(recipe, task), task)
    return (layers, part.inputs, part.targets), options


def _from_function(target: str, given: Mapping[str, Any]) -> CheckArguments:
    result = _find(target)()
    if not isinstance(result, tuple) or len(result) not in (2, 4):
        raise ConfigError(
            f"{target} returned {_described(result)}; return (layers, inputs, targets, loss), or "
            "(model, example_inputs)"
        )
    layers, inputs, targets, loss = result if len(result) == 4 else (*result, None, loss_of_all)
    options = {**_DEFAULTS, **given, "loss": loss}
    options["schedule"] = named_schedule(
        options["schedule"], options["num_stages"], options.pop("stages_per_rank")
    )
    options["recompute"] = Recompute(options["recompute"])
    return (layers, inputs, targets), options


def loss_of_all(output: Any, _target: Any) -> Tensor:
    """Return the loss that a model computes itself; else a number to which all outputs add."""
    own = loss_in(output)
    if own is not None:
        return own
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


def _described(value: Any) -> str:
    return f"a tuple of {len(value)}" if isinstance(value, tuple) else f"a {type(value).__name__}"
