"""From a recipe to a finished run: start a new run folder, or go on with an old one."""

import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from penstock.errors import RunFolderError

from .display import Display
from .interrupt import Interrupt
from .loop import Trainer
from .read_recipe import check_resumable, read_recipe, recipe_to_toml
from .report import summarise, write_timeline
from .run_folder import RunFolder, check_free, create, create_numbered, open_existing
from .summary import Summary

RUNS = Path("runs")


def start_run(
    recipe_path: Path,
    overrides: Sequence[str],
    run_folder: Path | None,
    console: Console,
    interrupt: Interrupt,
) -> Summary:
    """Train what a recipe says in a new run folder; by default runs/<recipe>-1, -2 and so on.

    Raises:
        RecipeError: the recipe or an override is wrong.
        RunFolderError: the run folder exists.
        PartitionError: the model cannot be cut so.
        KeyboardInterrupt: `interrupt` was wanted before anything was begun.
    """
    if run_folder is not None:
        check_free(run_folder)
    recipe = read_recipe(recipe_path, overrides)
    with Trainer(recipe) as trainer:
        interrupt.raise_if_wanted()
        toml = recipe_to_toml(recipe)
        if run_folder is not None:
            folder = create(run_folder, toml)
        else:
            folder = create_numbered(RUNS, recipe_path.stem, toml)
        return _run(trainer, folder, console, interrupt)


def resume_run(
    run_folder: Path,
    recipe_path: Path | None,
    overrides: Sequence[str],
    console: Console,
    interrupt: Interrupt,
) -> Summary:
    """Go on from the newest checkpoint of a run folder, bit by bit as if it had never stopped.

    Raises:
        RunFolderError: it is no run folder, or the run is finished.
        RecipeError: the recipe or an override changes more than how the run is executed.
        CheckpointError: the newest checkpoint is damaged or foreign.
        KeyboardInterrupt: `interrupt` was wanted before anything was begun.
    """
    folder = open_existing(run_folder)
    old = read_recipe(folder.recipe_path)
    new = read_recipe(recipe_path or folder.recipe_path, overrides)
    check_resumable(old, new)
    with Trainer(new) as trainer:
        interrupt.raise_if_wanted()
        trainer.resume(folder)
        if trainer.finished:
            raise RunFolderError(
                f"{run_folder} has trained all its {new.train.epochs} epochs; there is nothing to "
                "resume. Start a new run for more"
            )
        folder.write_recipe(recipe_to_toml(new))
        console.print(
            f"resuming {folder.path} after step {trainer.position.step}", highlight=False
        )
        return _run(trainer, folder, console, interrupt)


def _run(trainer: Trainer, folder: RunFolder, console: Console, interrupt: Interrupt) -> Summary:
    console.print(str(trainer.pipe), highlight=False, markup=False, soft_wrap=True)
    start_s = time.perf_counter()
    with Display(console, trainer.recipe.train.epochs, trainer.steps_per_epoch) as display:
        trainer.run(folder, display, interrupt)
    seconds = time.perf_counter() - start_s
    if trainer.meter.timeline is not None:
        left_out = write_timeline(folder, trainer.meter.timeline)
        if left_out:
            console.print(left_out, highlight=False, markup=False)
    return summarise(trainer, folder, seconds)
