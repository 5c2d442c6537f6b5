"""From a recipe to a finished run: start a new run folder, or go on with an old one.

In a job of many processes each of them calls these alike; rank 0 alone writes to the run folder,
but for the shards of checkpoints, and the others see it on a disk that all hosts share.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from penstock.errors import RunFolderError
from penstock.mesh import Mesh
from penstock.mesh.meet import join, meeting, told_by_first

from .build import build_model
from .display import Display
from .interrupt import Interrupt
from .job import job_name
from .layout import check_layout, make_mesh, num_processes, refit
from .loop import Trainer
from .read_recipe import check_resumable, read_recipe, recipe_to_toml
from .recipe import Recipe
from .report import summarise, write_timeline
from .run_folder import (
    RunFolder,
    begun_by,
    check_free,
    create,
    create_numbered,
    open_existing,
)
from .summary import Summary

RUNS = Path("runs")
_LAYOUT_KEYS = ("pipeline.num_stages", "pipeline.num_replicas")


@dataclass(frozen=True, slots=True)
class Request:
    """What a user asks for: a recipe, changes of single keys, and where the run is kept."""

    recipe_path: Path | None
    overrides: Sequence[str] = ()
    run_folder: Path | None = None


def start_run(request: Request, console: Console, interrupt: Interrupt) -> Summary:
    """Train what a recipe says in a new run folder; by default runs/<recipe>-1, -2 and so on.

    A job that torchrun starts again goes on with the run folder that it began.

    Raises:
        RecipeError: the recipe or an override is wrong, or does not fit the number of processes.
        RunFolderError: the run folder exists.
        PartitionError: the model cannot be cut so.
        MeshError: the processes do not find each other.
        KeyboardInterrupt: `interrupt` was wanted before anything was begun.
    """
    assert request.recipe_path is not None
    recipe = read_recipe(request.recipe_path, request.overrides)
    begun = _begun_before(request, recipe)
    if begun is not None:
        go_on = Request(request.recipe_path, request.overrides, begun)
        return resume_run(go_on, console, interrupt, refits=True)
    check_layout(recipe, num_processes())
    if request.run_folder is not None:
        check_free(request.run_folder)
    with make_mesh(recipe) as mesh, mesh.reporting(), Trainer(recipe, mesh) as trainer:
        trainer.raise_if_wanted(interrupt)
        path = mesh.from_first(lambda: _create(request, recipe).path, "for the run folder")
        folder = _seen_by_all(mesh, path)
        return _run(trainer, folder, console, interrupt)


def resume_run(
    request: Request, console: Console, interrupt: Interrupt, *, refits: bool = False
) -> Summary:
    """Go on from the newest checkpoint of a run folder, bit by bit as if it had never stopped.

    Stages and replicas are fitted to the processes that are there, unless the request says how
    many; with `refits`, even then.

    Raises:
        RunFolderError: it is no run folder, or the run is finished.
        RecipeError: the recipe or an override changes more than how the run is executed.
        CheckpointError: the newest checkpoint is damaged or foreign.
        MeshError: the processes do not find each other.
        KeyboardInterrupt: `interrupt` was wanted before anything was begun.
    """
    assert request.run_folder is not None
    folder = open_existing(request.run_folder)
    old = read_recipe(folder.recipe_path)
    new = read_recipe(request.recipe_path or folder.recipe_path, request.overrides)
    check_resumable(old, new)
    if refits or not _says_layout(request.overrides):
        new = refit(new, num_processes(), _num_layers(new))
    with make_mesh(new) as mesh, mesh.reporting(), Trainer(new, mesh) as trainer:
        trainer.raise_if_wanted(interrupt)
        folder = _seen_by_all(mesh, folder.path)
        trainer.resume(folder)
        if trainer.finished:
            raise RunFolderError(
                f"{folder.path} has trained all its {new.train.epochs} epochs; there is nothing "
                "to resume. Start a new run for more"
            )
        folder.write_recipe(recipe_to_toml(new))
        console.print(
            f"resuming {folder.path} after step {trainer.position.step}{_as_layout(old, new)}",
            highlight=False,
            soft_wrap=True,
        )
        return _run(trainer, folder, console, interrupt)


def _begun_before(request: Request, recipe: Recipe) -> Path | None:
    """Give the run folder that an earlier attempt of this torchrun job began; rank 0 looks."""
    if job_name() is None:
        return None
    assert request.recipe_path is not None
    wanted = request.run_folder
    places = [wanted] if wanted is not None else RUNS.glob(f"{request.recipe_path.stem}-*")
    begun = begun_by(job_name(), places)
    if num_processes() == 1:
        return begun
    join(recipe.pipeline.timeout_s)
    with meeting():
        told: Path | None = told_by_first(begun)
    return told


def _create(request: Request, recipe: Recipe) -> RunFolder:
    toml = recipe_to_toml(recipe)
    if request.run_folder is not None:
        return create(request.run_folder, toml, job_name())
    assert request.recipe_path is not None
    return create_numbered(RUNS, request.recipe_path.stem, toml, job_name())


def _seen_by_all(mesh: Mesh, path: Path) -> RunFolder:
    """Open the run folder in every process.

    Raises:
        RunFolderError: a process does not see it; on all of them alike.
    """
    folder = RunFolder(path, writes=mesh.is_first_rank)
    sees = mesh.gather(folder.recipe_path.is_file(), "for the others to open the run folder")
    blind = [str(rank) for rank, good in enumerate(sees) if not good]
    if blind:
        raise RunFolderError(
            f"the run folder {path} is not seen by rank {', '.join(blind)}; put it on a disk that "
            "all hosts share (--run-folder), and start all processes in the same folder"
        )
    return folder


def _says_layout(overrides: Sequence[str]) -> bool:
    return any(override.partition("=")[0].strip() in _LAYOUT_KEYS for override in overrides)


def _num_layers(recipe: Recipe) -> int:
    """Count the layers of the model without making them."""
    with torch.device("meta"):
        return len(build_model(recipe))


def _as_layout(old: Recipe, new: Recipe) -> str:
    was, now = old.pipeline, new.pipeline
    if (was.num_stages, was.num_replicas) == (now.num_stages, now.num_replicas):
        return ""
    return (
        f", as {now.num_stages} stages x {now.num_replicas} replicas "
        f"(before: {was.num_stages} x {was.num_replicas})"
    )


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
