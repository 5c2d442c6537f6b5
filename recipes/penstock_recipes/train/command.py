"""Run the training of a recipe: start a new run folder, or resume an old one.

    Request -> recipe and plan -> checks -> mesh -> Trainer -> run folder -> Summary

Each process of a job calls these functions alike.  Rank 0 writes to the run folder; every process
writes its shards of checkpoints.  The other ranks need a disk that all hosts share.
"""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from penstock import Mesh, Placement, Plan, layer_facts
from penstock.errors import PlanError
from penstock.mesh import from_rank_0, num_processes
from penstock.trace.units import count_text
from penstock_recipes.errors import RecipeError, RunFolderError
from penstock_recipes.recipe.read import check_resumable, read_recipe, recipe_to_toml
from penstock_recipes.recipe.recipe import Recipe, marked_keys
from penstock_recipes.recipe.section import Mark

from .automatic import check_cluster, device_kind, meet_by_plan
from .build import model_layers, names_of
from .display import Display, say
from .environment import environment_of, job_name
from .interrupt import Interrupt
from .layout import check_layout, is_uneven, read_plan, refit, with_plan
from .loop import Trainer
from .report import summarise, write_report, write_timeline
from .run_files import ENVIRONMENT, PLAN, PREDICTED, RECIPE
from .run_folder import (
    RunFolder,
    begun_by,
    check_free,
    create,
    create_numbered,
    numbered,
    open_existing,
)
from .scalars import Summary, check_scalars

RUNS = Path("runs")


@dataclass(frozen=True, slots=True)
class Request:
    """The user's request for a run."""

    recipe_path: Path | None
    """The recipe; None to resume with the run's own."""
    overrides: Sequence[str] = ()
    """Changes of single keys, as "section.key=value"."""
    run_folder: Path | None = None
    """The folder to create or to resume."""
    plan_path: Path | None = None
    """The plan to run the model by."""

    def plan_for(self, num_processes: int) -> Plan | None:
        """Read the plan, if there is one.

        Raises:
            PlanError: it needs another number of processes, or the file does not hold one.
            RecipeError: an override changes what the plan decides.
        """
        if self.plan_path is None:
            return None
        plan = read_plan(self.plan_path, self.overrides)
        plan.check_ranks(num_processes)
        return plan

    def recipe(self, path: Path, plan: Plan | None) -> Recipe:
        """Read a recipe, with the overrides and the keys that the plan decides.

        Raises:
            RecipeError: the recipe or an override is wrong.
        """
        recipe = read_recipe(path, self.overrides)
        check_scalars(recipe)
        return recipe if plan is None else with_plan(recipe, plan)


def start_run(request: Request, console: Console, interrupt: Interrupt) -> Summary:
    """Train a recipe in a new run folder, by default runs/<recipe>-1, -2 and so on.

    A job that torchrun restarts resumes the run folder that it created.

    Raises:
        RecipeError: the recipe or an override is wrong, or does not fit the number of processes.
        RunFolderError: the run folder exists.
        PartitionError: the model cannot be divided into these stages.
        MeshError: the processes do not find each other.
        KeyboardInterrupt: a stop was requested before the run began.
    """
    # A restarted job resumes its own run folder.
    recipe, plan = _to_start(request, num_processes())
    begun = _begun_before(request, recipe, plan)
    if begun is not None:
        return _go_on(begun, recipe, plan, console, interrupt)
    # Find mistakes before the processes wait for each other.
    check_fits(recipe, plan, num_processes())
    if request.run_folder is not None:
        check_free(request.run_folder)
    recipe, plan, met = meet_by_plan(recipe, plan)
    with met as mesh, mesh.reporting(), Trainer(recipe, mesh, plan=plan) as trainer:
        trainer.raise_if_wanted(interrupt)
        say(console, trainer.devices_text())
        # Every host has its own name of the job; rank 0 creates the folder.
        names = mesh.world.gather(job_name(), "for the others to begin the run")
        jobs = [name for name in names if name is not None]
        path = mesh.world.from_first(
            lambda: _create(request, trainer.recipe, jobs).path, "for the run folder"
        )
        with _opened(mesh, path) as folder:
            _keep_prediction(request, folder)
            return _run(trainer, folder, console, interrupt)


def check_request(request: Request, num_processes: int, *, resumes: bool) -> None:
    """Find a user's mistakes before `num_processes` processes are started.

    Raises:
        RecipeError, RunFolderError: as `start_run`, or as `resume_run` with `resumes`.
    """
    to_run = to_resume if resumes else _to_start
    check_fits(*to_run(request, num_processes), num_processes)
    if request.run_folder is not None and not resumes:
        check_free(request.run_folder)


def _to_start(request: Request, num_processes: int) -> tuple[Recipe, Plan | None]:
    assert request.recipe_path is not None
    plan = request.plan_for(num_processes)
    return request.recipe(request.recipe_path, plan), plan


def check_fits(recipe: Recipe, plan: Plan | None, num_processes: int) -> None:
    """Refuse a recipe or a plan that does not fit the number of processes, or the model."""
    if plan is None and recipe.pipeline.plan:
        check_cluster(recipe, num_processes)
        return
    check_layout(recipe, num_processes, plan)
    if plan is not None:
        plan.check_model(layer_facts(model_layers(recipe)))


def resume_run(request: Request, console: Console, interrupt: Interrupt) -> Summary:
    """Resume from the newest checkpoint of a run folder; the result keeps its bits.

    A run that is finished goes on if the request gives it more epochs, or more patience.
    Stages, replicas and shards are fitted to the number of processes, unless the request sets
    them.

    Raises:
        RunFolderError: it is no run folder, or the run is finished.
        RecipeError: the recipe or an override changes what the run computes.
        CheckpointError: the newest checkpoint is damaged, or of another run.
        MeshError: the processes do not find each other.
        KeyboardInterrupt: a stop was requested before the run began.
    """
    assert request.run_folder is not None
    new, plan = to_resume(request, num_processes())
    check_fits(new, plan, num_processes())
    with _continued(request.run_folder, new, plan, console, interrupt) as (trainer, folder):
        say(console, *trainer.resume(folder))
        is_too_short = trainer.position.num_begun > new.train.epochs
        if is_too_short or (trainer.finished and trainer.is_made(folder)):
            raise RunFolderError(f"{folder.path} {trainer.why_ended}")
        _say_how(console, folder, trainer)
        return _run(trainer, folder, console, interrupt)


def to_resume(
    request: Request, num_processes: int, to: str = "resume"
) -> tuple[Recipe, Plan | None]:
    """Return the recipe and the plan with which `num_processes` processes resume a run.

    Raises:
        RunFolderError: it is no run folder.
        RecipeError: the recipe or an override changes what the run computes.
    """
    assert request.run_folder is not None
    folder = open_existing(request.run_folder, to=to)
    old = read_recipe(folder.recipe_path)
    # A request for no other layout keeps a plan that recipe keys cannot express.
    plan = request.plan_for(num_processes)
    keys = [override.partition("=")[0].strip() for override in request.overrides]
    asks = request.recipe_path is not None or any(k.startswith("pipeline.") for k in keys)
    if plan is None and not asks and not old.pipeline.plan:
        plan = _uneven_plan(folder, num_processes)
    new = request.recipe(request.recipe_path or folder.recipe_path, plan)
    new = _with_microbatches_of(old, new)
    check_resumable(old, new)
    # Otherwise the layout follows the number of processes.
    sets_layout = not marked_keys(Mark.PROCESSES).isdisjoint(keys)
    if plan is None and not new.pipeline.plan and not sets_layout:
        new = refit(new, num_processes, len(names_of(model_layers(new))))
    return new, plan


def _uneven_plan(folder: RunFolder, num_processes: int) -> Plan | None:
    """Return the run's last plan if its stages have unlike meshes, for `num_processes` ranks."""
    plan = _last_plan(folder)
    if plan is None or plan.placement.num_ranks != num_processes:
        return None
    return plan if is_uneven(plan.placement) else None


def _last_plan(folder: RunFolder) -> Plan | None:
    """Read the plan of the run's last start; None if there is none."""
    with suppress(PlanError):
        return Plan.load(folder.path / PLAN)
    return None


def _go_on(
    path: Path, wanted: Recipe, plan: Plan | None, console: Console, interrupt: Interrupt
) -> Summary:
    """Resume, or just report, the run that an earlier attempt of this job began.

    A restarted process keeps the recipe of the run folder, except for the layout: the user may
    have changed the recipe file since.
    """
    old = read_recipe(RunFolder(path).recipe_path)
    wanted = _with_microbatches_of(old, wanted)
    # A second job of the same name must train the same recipe.
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) == 0:
        try:
            check_resumable(old, wanted, may_lengthen=False)
        except RecipeError as error:
            raise RecipeError(
                f"{error}\nThe torchrun job {job_name()} began {path}, so this one goes on with "
                "it; a new run needs another --rdzv-id"
            ) from None
    new = _with_layout_of(wanted, old)
    if plan is not None and with_plan(new, plan) != new:
        plan = None  # the run resumes in another layout
    if plan is None and not new.pipeline.plan:
        new = refit(new, num_processes(), len(names_of(model_layers(old))))
    with _continued(path, new, plan, console, interrupt) as (trainer, folder):
        say(console, *trainer.resume(folder, falls_back=True))
        if trainer.finished and trainer.is_made(folder):
            say(console, f"{path}, which this job began, {trainer.why_ended}")
            return summarise(trainer, folder, seconds=0.0)
        _say_how(console, folder, trainer)
        return _run(trainer, folder, console, interrupt)


@contextmanager
def _continued(
    path: Path, recipe: Recipe, plan: Plan | None, console: Console, interrupt: Interrupt
) -> Iterator[tuple[Trainer, RunFolder]]:
    """Open the run folder of a run to resume, with its trainer."""
    recipe, plan, met = meet_by_plan(recipe, plan)
    with met as mesh, mesh.reporting(), Trainer(recipe, mesh, resumes=True, plan=plan) as trainer:
        trainer.raise_if_wanted(interrupt)
        say(console, trainer.devices_text())
        with _opened(mesh, path) as folder:
            yield trainer, folder


def _with_microbatches_of(run: Recipe, new: Recipe) -> Recipe:
    """Keep the number of micro-batches of a run with plan = "auto", unless `new` sets it."""
    if new.pipeline.planned_microbatches is not None:
        return new
    section = new.pipeline.model_copy(update={"num_microbatches": run.pipeline.num_microbatches})
    return new.model_copy(update={"pipeline": section})


def _with_layout_of(wanted: Recipe, run: Recipe) -> Recipe:
    """Return the run's recipe with the wanted layout, if replicas can share its micro-batches."""
    keys = wanted.pipeline.marked(Mark.LAYOUT, Mark.PROCESSES)
    layout = {key: getattr(wanted.pipeline, key) for key in keys}
    if run.pipeline.num_microbatches % wanted.pipeline.num_replicas:
        return run
    return run.model_copy(update={"pipeline": run.pipeline.model_copy(update=layout)})


def _say_how(console: Console, folder: RunFolder, trainer: Trainer) -> None:
    """Write the recipe to the run folder, and print the step from which the run resumes."""
    folder.write_text(RECIPE, recipe_to_toml(trainer.recipe))
    before = _last_plan(folder)
    layout = "" if before is None else _as_layout(before.placement, trainer.pipe.plan.placement)
    say(console, f"resuming {folder.path} after step {trainer.position.step}{layout}")


def _begun_before(request: Request, recipe: Recipe, plan: Plan | None) -> Path | None:
    """Return the run folder that an earlier attempt of this torchrun job began; rank 0 looks."""
    if job_name() is None:
        return None
    assert request.recipe_path is not None
    folder, stem = request.run_folder, request.recipe_path.stem
    begun = begun_by(job_name(), numbered(RUNS, stem) if folder is None else [folder])
    if num_processes() > 1:
        begun = from_rank_0(begun, recipe.pipeline.timeout_s, device_kind(recipe, plan))
    return begun


def _create(request: Request, recipe: Recipe, jobs: list[str]) -> RunFolder:
    toml = recipe_to_toml(recipe)
    if request.run_folder is not None:
        return create(request.run_folder, toml, jobs)
    assert request.recipe_path is not None
    return create_numbered(RUNS, request.recipe_path.stem, toml, jobs)


@contextmanager
def _opened(mesh: Mesh, path: Path) -> Iterator[RunFolder]:
    """Open the run folder in every process, and lock it against other jobs.

    Raises:
        RunFolderError: a process does not see it, or another job trains there; on all ranks.
    """
    folder = RunFolder(path, writes=mesh.is_first_rank)
    sees = mesh.world.gather(folder.recipe_path.is_file(), "for the others to open the run folder")
    blind = [str(rank) for rank, good in enumerate(sees) if not good]
    if blind:
        raise RunFolderError(
            f"the run folder {path} is not seen by rank {', '.join(blind)}; put it on a disk that "
            "all hosts share (--run-folder), and start all processes in the same folder"
        )
    with ExitStack() as locks:

        def hold() -> None:
            if (lock := folder.lock()) is not None:
                locks.callback(lock.release)

        mesh.world.from_first(hold, "to have the run folder for themselves")
        yield folder


def _as_layout(before: Placement, now: Placement) -> str:
    """Return the layouts as ", as 2 stages x 1 replica (before: 1 x 2)"; empty if they agree."""
    was, is_now = (
        [count_text(placement.num_stages, "stage"), count_text(placement.num_replicas, "replica")]
        + ([_shards(placement)] if before.most_shards * now.most_shards > 1 else [])
        for placement in (before, now)
    )
    if was == is_now:
        return ""
    numbers = (word.rpartition(" ")[0] for word in was)
    return f", as {' x '.join(is_now)} (before: {' x '.join(numbers)})"


def _shards(placement: Placement) -> str:
    """Count the shards of stages: "2 shards", or "1 + 2 shards" if stages differ."""
    if not is_uneven(placement):
        return count_text(placement.most_shards, "shard")
    return " + ".join(str(len(of_stage[0])) for of_stage in placement.ranks) + " shards"


def _keep_prediction(request: Request, folder: RunFolder) -> None:
    """Copy the predicted timeline that `penstock plan` wrote beside the plan, for the report."""
    if request.plan_path is None:
        return
    with suppress(OSError, UnicodeDecodeError):
        predicted = request.plan_path.with_suffix(".predicted.json")
        folder.write_text(PREDICTED, predicted.read_text("utf-8"))


def _run(trainer: Trainer, folder: RunFolder, console: Console, interrupt: Interrupt) -> Summary:
    """Train to the end, or to a requested stop; write the timeline, the summary and the report."""
    remarks = (trainer.recipe.shortened_warmup, *trainer.task.remarks(), str(trainer.pipe))
    say(console, *filter(None, remarks))
    folder.keep_plan(trainer.pipe.plan.to_json(), trainer.position.step)
    folder.write_text(ENVIRONMENT, environment_of(trainer.mesh))
    start_s = time.perf_counter()
    num_epochs = trainer.recipe.train.epochs
    with Display(console, num_epochs, trainer.steps_per_epoch, trainer.task) as display:
        trainer.run(folder, display, interrupt)
    seconds = time.perf_counter() - start_s
    warnings = []
    if trainer.meter.timeline is not None:
        warnings.append(write_timeline(folder, trainer.meter.timeline))
    summary = summarise(trainer, folder, seconds)
    if trainer.finished and summary.epochs < num_epochs:
        warnings.append(f"{folder.path} {trainer.why_ended}")
    warnings.append(write_report(trainer, folder, summary))
    say(console, *filter(None, warnings))
    return summary
