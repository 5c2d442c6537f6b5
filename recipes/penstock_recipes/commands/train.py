"""`penstock train`: train a recipe, or resume a run."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from penstock.cli import (
    launch,
    num_processes_option,
    refuse_inside_torchrun,
    require_torch,
    say,
    set_option,
)
from penstock_recipes.recipe.cookbook import find_recipe
from penstock_recipes.train.interrupt import Interrupt

if TYPE_CHECKING:
    from penstock_recipes.train.command import Request


@click.command()
@click.argument("recipe", required=False)
@set_option
@click.option(
    "--run-folder",
    type=click.Path(path_type=Path),
    help="Folder to make; never overwritten.  [default: the next free runs/RECIPE-1, -2, ...]",
)
@click.option(
    "--resume",
    metavar="RUN_FOLDER",
    type=click.Path(path_type=Path),
    help="Go on from the newest checkpoint of this run folder; RECIPE may then be left out.",
)
@click.option(
    "--plan",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Run the model as this plan says, instead of as the recipe's section [pipeline] does; "
    "each run folder has the plan.json of its run.",
)
@click.option(
    "--cluster",
    metavar="NAME_OR_FILE",
    help='What a recipe with pipeline.plan = "auto" plans for, a device for each process.  '
    "[default: the recipe's, or this machine, measured]",
)
@click.option(
    "--device",
    metavar="KIND_OR_DEVICE",
    help="Compute on it: auto (an accelerator for each rank, or the CPU), cpu, cuda, cuda:1; the "
    "first line of a run names it.  [default: the recipe's]",
)
@num_processes_option
@click.option(
    "--max-restarts",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="With --num-processes: how often to go on when a process fails.",
)
@click.option("--json", "as_json", is_flag=True, help="Write the summary as one line of JSON.")
@click.pass_context
def train(context: click.Context, /, **_: object) -> int:
    """Train the model of RECIPE, a name or a TOML file, as a pipeline.

    Ctrl-C, SIGTERM or SIGHUP finishes the step, saves a checkpoint and ends with code 130, 143 or
    129.  A closed pipe or terminal ends what is shown, not the run.  A resumed run goes on bit by
    bit, also with another number of stages, schedule or recompute policy, in one process or in
    many.

    \b
    Examples:
      penstock train digits
      penstock train digits --set pipeline.schedule=one_f_one_b --set train.epochs=5
      penstock train --resume runs/digits-1 --set pipeline.num_stages=3
      penstock train digits --plan runs/digits-1/plan.json
      penstock train digits --num-processes 2 --max-restarts 3
      torchrun --nproc-per-node 2 -m penstock train digits
    """
    cluster = context.params.pop("cluster")
    if cluster is not None:
        context.params["overrides"] += (f"pipeline.cluster={json.dumps(cluster)}",)
    device = context.params.pop("device")
    if device is not None:
        context.params["overrides"] += (f"pipeline.device={json.dumps(device)}",)
    asked = _Asked(**context.params)
    asked.check()
    if asked.num_processes is not None:
        require_torch()
        from penstock_recipes.train.command import check_request

        check_request(asked.request, asked.num_processes, resumes=asked.resume is not None)
        return launch(asked.num_processes, asked.max_restarts, asked.as_arguments())
    return _train(asked)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """The arguments of the command line."""

    recipe: str | None
    overrides: tuple[str, ...]
    run_folder: Path | None
    resume: Path | None
    plan: Path | None
    num_processes: int | None
    max_restarts: int
    as_json: bool

    def check(self) -> None:
        if self.resume is None and self.recipe is None:
            raise click.UsageError(
                "give a RECIPE, such as digits (`penstock recipes`), or --resume RUN_FOLDER"
            )
        if self.resume is not None and self.run_folder is not None:
            raise click.UsageError("--resume goes on in its own folder; leave out --run-folder")
        if self.num_processes is not None:
            refuse_inside_torchrun()
        if self.max_restarts and self.num_processes is None:
            raise click.UsageError(
                "--max-restarts needs --num-processes; with torchrun, give it to torchrun"
            )

    @property
    def request(self) -> "Request":
        """The request for a run."""
        from penstock_recipes.train.command import Request

        recipe = None if self.recipe is None else find_recipe(self.recipe)
        return Request(recipe, self.overrides, self.resume or self.run_folder, self.plan)

    def as_arguments(self) -> list[str]:
        """Return the command line again, without the options of the launch."""
        words = ["train", *([self.recipe] if self.recipe is not None else [])]
        for override in self.overrides:
            words += ["--set", override]
        paths = {"--run-folder": self.run_folder, "--resume": self.resume, "--plan": self.plan}
        for name, path in paths.items():
            words += [name, str(path)] if path is not None else []
        return [*words, *(["--json"] if self.as_json else [])]


def _train(asked: _Asked) -> int:
    """Train in this process, which may be one of many; only rank 0 prints."""
    is_one_of_many = os.environ.get("WORLD_SIZE", "1") != "1"  # numbers are checked later
    if is_one_of_many:  # gloo then connects only processes that exchange messages
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    is_first = os.environ.get("RANK", "0") == "0"
    # Catch signals before the imports, which take seconds.
    if is_first:  # on a terminal only, as the imports take seconds
        what = f"go on with {asked.resume}" if asked.resume else f"train {asked.recipe}"
        say(f"loading PyTorch, to {what}")
    with Interrupt(is_one_of_many=is_one_of_many) as interrupt:
        require_torch()  # not before: imports may swallow a KeyboardInterrupt
        from rich.console import Console

        from penstock_recipes.train.command import resume_run, start_run
        from penstock_recipes.train.display import show_summary

        console = Console(stderr=True, quiet=not is_first)
        run = resume_run if asked.resume is not None else start_run
        try:
            summary = run(asked.request, console, interrupt)
        except KeyboardInterrupt:
            click.echo(
                "penstock: interrupted; nothing was saved since the last checkpoint", err=True
            )
            return interrupt.exit_code
    # Print the summary, and the command that resumes an interrupted run.
    if not is_first:
        return 0 if summary.finished else interrupt.exit_code
    if asked.as_json:
        click.echo(summary.to_json())
    else:
        show_summary(Console(), summary)
    if summary.finished:
        return 0
    click.echo(
        f"interrupted after step {summary.steps}; everything is saved. "
        f"Go on with: penstock train --resume {summary.run_folder}",
        err=True,
    )
    return interrupt.exit_code
