"""Weights to start from: those of another run, but for the layers that begin anew."""

from collections.abc import Collection, Sequence
from pathlib import Path

import torch

from penstock.checkpoint.files import MODEL, OPTIMIZER, read_facts, read_some, tensor_kinds
from penstock.errors import CheckpointError, RecipeError
from penstock.pipeline import Pipeline

from .averaging import KEY
from .recipe import Start
from .run_folder import RECIPE, RunFolder


def start_from(start: Start, pipe: Pipeline, names: list[str]) -> None:
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
    _check_new(start, names)
    wanted = [name for name in own if not _is_in(name, start.new_layers)]
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


def saved_weights(checkpoint: Path, names: Collection[str]) -> dict[str, torch.Tensor]:
    """Read the named tensors of a checkpoint; of parameters the average, if there is one."""
    facts = read_facts(checkpoint)
    found = read_some(checkpoint, MODEL, names)
    if facts["optimizer"] is not None:
        averages = {f"{name}.{KEY}": name for name in names}
        kept = [key for key in tensor_kinds(checkpoint, OPTIMIZER) if key in averages]
        of_these = read_some(checkpoint, OPTIMIZER, kept)
        found.update({averages[key]: tensor for key, tensor in of_these.items()})
    return found


def mean_weights(checkpoints: Sequence[Path], names: Collection[str]) -> dict[str, torch.Tensor]:
    """Give the mean of the weights of several checkpoints; of one, its weights."""
    first, *others = (saved_weights(checkpoint, names) for checkpoint in checkpoints)
    if not others:
        return first
    return {name: _mean([tensor, *(o[name] for o in others)]) for name, tensor in first.items()}


def _mean(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    if not tensors[0].is_floating_point():  # a count, such as BatchNorm's of its batches
        return tensors[0]
    total = torch.stack([tensor.to(torch.float64) for tensor in tensors]).mean(dim=0)
    return total.to(tensors[0].dtype)
