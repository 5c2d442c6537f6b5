"""Find and check the checkpoint that a run starts or resumes from, and load its weights."""

from pathlib import Path

import torch

from penstock import CheckpointReader, Pipeline
from penstock.errors import CheckpointError
from penstock_recipes.errors import RecipeError
from penstock_recipes.recipe.read import check_same_run, read_recipe
from penstock_recipes.recipe.recipe import Recipe, Start
from penstock_recipes.recipe.section import Mark
from penstock_recipes.train.weights import Names, SavedWeights

from .run_files import RECIPE, START
from .run_folder import RunFolder
from .tasks.task import Task


def check_start(recipe: Recipe, task: Task) -> None:
    """Check that the recipe's [start] exists and fits its task.

    Raises:
        RecipeError: there is no such checkpoint, or it was trained on this run's held-out data.
        CheckpointError: its weights belong to another vocabulary.
    """
    start = recipe.start
    if start.checkpoint:
        checkpoint_of(start)
        task.check_start(run_of(start))
        _check_split(recipe, run_of(start))
    elif start.new_layers:
        raise RecipeError(
            f"start.new_layers = {list(start.new_layers)} begin anew in any case: there is no "
            "start.checkpoint. Give one, or leave them out"
        )


def _check_split(recipe: Recipe, folder: Path) -> None:
    """Refuse weights that were trained on samples that this run holds out."""
    if not (folder / RECIPE).is_file():
        return
    data, other = recipe.data, read_recipe(folder / RECIPE).data
    if data.name != other.name or getattr(data, "path", "") != getattr(other, "path", ""):
        return
    for key in data.marked(Mark.HELD_OUT):
        here, there = getattr(data, key), getattr(other, key)
        if here != there:
            raise RecipeError(
                f"data.{key} = {here!r} holds out other samples than the {there!r} of {folder}, "
                "whose weights are started from: they have learnt from what this run would be "
                f"judged by. Set data.{key} to {there!r} too"
            )


def begun_from(start: Start, folder: RunFolder) -> Path:
    """Find the checkpoint that the run in `folder` began with, to begin again.

    The other run may have saved newer checkpoints since.

    Raises:
        RecipeError: there is no such checkpoint.
        CheckpointError: the checkpoint has changed, or is gone.
    """
    noted = _noted(folder)
    if noted is None:
        return checkpoint_of(start)  # the run ended before it noted one
    digest, name = noted
    checkpoint = Path(name)
    if not checkpoint.is_dir() or CheckpointReader(checkpoint).digest != digest:
        raise CheckpointError(
            f"{folder.path} has no checkpoint to go on from, and cannot begin again: the weights "
            f"that it began with, {checkpoint}, are gone or not the same any more. Put that "
            "checkpoint back, or start a new run"
        )
    return checkpoint


def note_start(checkpoint: Path, folder: RunFolder) -> None:
    """Write the digest and the path of the first weights, unless they are known."""
    if _noted(folder) is None:
        folder.write_text(START, f"{CheckpointReader(checkpoint).digest}  {checkpoint}\n")


def _noted(folder: RunFolder) -> tuple[str, str] | None:
    """Read the digest and the path that `note_start` wrote."""
    if not (folder.path / START).is_file():
        return None
    digest, _, name = (folder.path / START).read_text(encoding="utf-8").strip().partition("  ")
    return digest, name


def start_from(start: Start, checkpoint: Path, pipe: Pipeline, names: Names) -> None:
    """Load the weights of a checkpoint into a pipeline, except for the recipe's new layers.

    `names` are the names of the whole model's tensors.  Running averages are preferred.

    Raises:
        RecipeError: the model does not have one of the new layers.
        CheckpointError: a tensor is missing, or has another shape.
    """
    # Every new layer must exist.
    for layer in start.new_layers:
        if not any(_is_in(name, (layer,)) for name in names):
            tops = ", ".join(dict.fromkeys(name.partition(".")[0] for name in names))
            raise RecipeError(
                f'start.new_layers has "{layer}", and the model has no such layer; it has {tops}'
            )
    # Compare all tensors before any is loaded.
    state = pipe.state_dict()
    old = {name for name in state if not _is_in(name, start.new_layers)}
    wanted = [name for name in names if name in old]
    saved = SavedWeights(checkpoint, names).read(wanted)
    faults = [f"{name} is missing" for name in wanted if name not in saved]
    faults += [
        f"{name} is {list(saved[name].shape)} there, {list(state[name].shape)} in the model"
        for name in saved
        if saved[name].shape != state[name].shape
    ]
    if faults:
        lines = "\n  ".join(faults[:20])
        raise CheckpointError(
            f"{checkpoint} does not fit the model; name what begins anew in start.new_layers:\n"
            f"  {lines}"
        )
    with torch.no_grad():
        for name, tensor in saved.items():
            state[name].copy_(tensor)


def run_of(start: Start) -> Path:
    """Return the run folder of the recipe's [start]."""
    path = Path(start.checkpoint)
    return path if (path / RECIPE).is_file() else path.parent.parent


def checkpoint_of(start: Start) -> Path:
    """Find the checkpoint of the recipe's [start]: itself, or the newest of a run folder.

    Raises:
        RecipeError: there is none.
    """
    path = Path(start.checkpoint)
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


def _is_in(name: str, layers: tuple[str, ...]) -> bool:
    return any(name == layer or name.startswith(f"{layer}.") for layer in layers)


def check_state(checkpoint: Path, recipe: Recipe) -> None:
    """Refuse a checkpoint of another run before anything is loaded.

    Raises:
        CheckpointError: it is damaged, or was not saved by a run.
        RunFolderError: a run of another recipe saved it.
    """
    state = CheckpointReader(checkpoint).state
    missing = [name for name in ("position", "recipe", "scaler") if name not in state]
    if missing:
        raise CheckpointError(
            f"{checkpoint} was not saved by `penstock train`: it has no {missing[0]}"
        )
    check_same_run(state["recipe"], recipe, checkpoint)


def way_out(folder: RunFolder) -> str:
    """Advise on a newest checkpoint that cannot be loaded: an older one, or a new start."""

    def is_sound(checkpoint: Path) -> bool:
        try:
            CheckpointReader(checkpoint).verify()
        except CheckpointError:
            return False
        return True

    *before, newest = folder.checkpoints()
    number = next((n for n in reversed(range(len(before))) if is_sound(before[n])), None)
    if number is None:
        return (
            f"No other checkpoint in {folder.path} is sound. If there is a copy of this one, put "
            f"it back; else the run can only begin again at step 0, which deleting {newest} does"
        )
    doomed = ", ".join(str(path) for path in (*before[number + 1 :], newest))
    return f"To resume from {before[number]}, delete {doomed}"
