"""Weights to start from: those of another run, but for the layers that begin anew."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from penstock.checkpoint.files import MODEL, OPTIMIZER, read_facts, read_some, tensor_kinds
from penstock.errors import CheckpointError, RecipeError
from penstock.pipeline import Pipeline

from .averaging import name_of_averaged
from .recipe import Start
from .run_folder import RECIPE, RunFolder

Names = Mapping[str, str]
"""Names of tensors, each with the first name of the same tensor: see `tensor_names`."""


def start_from(start: Start, pipe: Pipeline, names: Names) -> None:
    """Load the weights that a recipe names into a pipeline, but for its new layers.

    `names` are those of the whole model's tensors.  The running average is taken if the run kept
    one.  Everything is compared first.

    Raises:
        RecipeError: there is no such checkpoint, or a new layer that the model does not have.
        CheckpointError: it lacks a tensor of the model, or has one of another shape.
    """
    if not start.checkpoint:
        if start.new_layers:
            raise RecipeError(
                f"start.new_layers = {list(start.new_layers)} begin anew in any case: there is no "
                "start.checkpoint. Give one, or leave them out"
            )
        return
    checkpoint = _checkpoint(Path(start.checkpoint))
    own = pipe.state_dict()
    _check_new(start, list(names))
    old = {name for name in own if not _is_in(name, start.new_layers)}
    wanted = {name: first for name, first in names.items() if name in old}
    found = saved_weights(checkpoint, wanted)
    faults = [f"{name} is missing" for name in wanted if name not in found]
    faults += [
        f"{name} is {list(found[name].shape)} there, {list(own[name].shape)} in the model"
        for name in found
        if found[name].shape != own[name].shape
    ]
    if faults:
        lines = "\n  ".join(faults[:20])
        raise CheckpointError(
            f"{checkpoint} does not fit the model; name what begins anew in start.new_layers:\n"
            f"  {lines}"
        )
    with torch.no_grad():
        for name, tensor in found.items():
            own[name].copy_(tensor)


def run_of(start: Start) -> Path:
    """Give the folder of the run that is started from."""
    path = Path(start.checkpoint)
    return path if (path / RECIPE).is_file() else path.parent.parent


def _checkpoint(path: Path) -> Path:
    """Give the checkpoint that a path means."""
    if (path / RECIPE).is_file():
        checkpoints = RunFolder(path, writes=False).checkpoints()
        if not checkpoints:
            raise RecipeError(
                f'start.checkpoint = "{path}" is a run folder without a checkpoint; let that run '
                "go on, or choose another"
            )
        return checkpoints[-1]
    if not path.is_dir():
        raise RecipeError(
            f'start.checkpoint = "{path}" does not exist; give the folder of a finished run, or '
            "one of its checkpoints"
        )
    return path


def _check_new(start: Start, names: list[str]) -> None:
    for layer in start.new_layers:
        if not any(_is_in(name, (layer,)) for name in names):
            tops = ", ".join(dict.fromkeys(name.partition(".")[0] for name in names))
            raise RecipeError(
                f'start.new_layers has "{layer}", and the model has no such layer; it has {tops}'
            )


def _is_in(name: str, layers: tuple[str, ...]) -> bool:
    return any(name == layer or name.startswith(f"{layer}.") for layer in layers)


def tensor_names(model: nn.Module) -> dict[str, str]:
    """Give all names of a whole model's tensors, each with the first name of the same tensor."""
    first: dict[int, str] = {}
    state = model.state_dict(keep_vars=True)
    return {name: first.setdefault(id(tensor), name) for name, tensor in state.items()}


def saved_weights(checkpoint: Path, names: Names) -> dict[str, torch.Tensor]:
    """Read the named tensors of a checkpoint; the average of each that has one.

    A parameter of several names has its average under one of them: it is that of all.
    """
    facts = read_facts(checkpoint)
    found = read_some(checkpoint, MODEL, names)
    if facts["optimizer"] is None:
        return found
    kept = {
        names[name]: key
        for key in tensor_kinds(checkpoint, OPTIMIZER)
        if (name := name_of_averaged(key)) in names
    }
    averages = read_some(checkpoint, OPTIMIZER, set(kept.values()))
    averaged = {name: kept[names[name]] for name in found if names[name] in kept}
    return {**found, **{name: averages[key] for name, key in averaged.items()}}


def mean_weights(checkpoints: Sequence[Path], names: Names) -> dict[str, torch.Tensor]:
    """Give the mean of the weights of several checkpoints, one read after the other; of one, its
    weights.
    """
    newest = saved_weights(checkpoints[-1], names)
    if len(checkpoints) == 1:
        return newest
    floats = {n: first for n, first in names.items() if newest[n].is_floating_point()}
    totals = {name: newest[name].to(torch.float64) for name in floats}
    for checkpoint in reversed(checkpoints[:-1]):
        for name, tensor in saved_weights(checkpoint, floats).items():
            totals[name] += tensor
    means = {n: (t / len(checkpoints)).to(newest[n].dtype) for n, t in totals.items()}
    return {**newest, **means}
