"""`penstock train`: train what a recipe says, or go on with a run."""

import os
from pathlib import Path

import click

from penstock.train.interrupt import Interrupt

from .options import INTERRUPTED


@click.command()
@click.argument("recipe", required=False, type=click.Path(path_type=Path))
@click.option(
    "--set",
    "overrides",
    metavar="SECTION.KEY=VALUE",
    multiple=True,
    help="Change a key of the recipe.",
)
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
@click.option("--json", "as_json", is_flag=True, help="Write the summary as one line of JSON.")
def train(
    recipe: Path | None,
    overrides: tuple[str, ...],
    run_folder: Path | None,
    resume: Path | None,
    as_json: bool,
) -> int:
    """Train the model of RECIPE, a TOML file, as a pipeline.

    Ctrl-C finishes the step, saves a checkpoint and ends with code 130.  A resumed run goes on bit
    by bit, also with another number of stages, schedule or recompute policy.

    \b
    Examples:
      penstock train recipes/digits.toml
      penstock train recipes/digits.toml --set pipeline.schedule=one_f_one_b --set train.epochs=5
      penstock train --resume runs/digits-1 --set pipeline.num_stages=3
    """
    if resume is None and recipe is None:
        raise click.UsageError(
            "give a RECIPE, such as recipes/digits.toml, or --resume RUN_FOLDER"
        )
    if resume is not None and run_folder is not None:
        raise click.UsageError("--resume goes on in its own folder; leave out --run-folder")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise click.UsageError(
            "this command runs in one process so far, and torchrun started "
            f"{os.environ['WORLD_SIZE']}; run it alone, or write a script with penstock.init_mesh"
        )
    with Interrupt() as interrupt:  # before the imports, which may swallow a KeyboardInterrupt
        from rich.console import Console

        from penstock.train.command import resume_run, start_run
        from penstock.train.display import show_summary

        console = Console(stderr=True)
        if resume is not None:
            summary = resume_run(resume, recipe, overrides, console, interrupt)
        else:
            assert recipe is not None
            summary = start_run(recipe, overrides, run_folder, console, interrupt)
    if as_json:
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
    return INTERRUPTED
