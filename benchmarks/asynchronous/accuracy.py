"""What weights that lag cost in accuracy: a few epochs of a recipe with each schedule.

python -m benchmarks.asynchronous.accuracy [digits] [names]
"""

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from rich.console import Console

from benchmarks.report import progress
from penstock_recipes.recipe.cookbook import find_recipe
from penstock_recipes.train.command import Request, start_run
from penstock_recipes.train.interrupt import Interrupt
from penstock_recipes.train.scalars import Summary


class Task(NamedTuple):
    """A recipe, what is changed in it for every schedule, and what is told of a run of it."""

    recipe: Path
    alike: tuple[str, ...]
    window: int
    score: Callable[[Summary, Path], str]


def _digits_read(run: Summary, folder: Path) -> str:
    return f"{run.scores['test_accuracy']:.1%}"


def _names_translated(run: Summary, folder: Path) -> str:
    languages = json.loads((folder / "scores.json").read_text())["model"].values()
    chrf = fmean(score["chrf"] for score in languages)
    return f"{chrf:.1f}, {run.scores['valid_loss']:.3f}"


TASKS = {
    "digits": Task(
        find_recipe("digits"),
        (
            "train.epochs=6",
            "train.batch_size=64",
            "pipeline.num_microbatches=4",
            "pipeline.partition=[7, 4]",
            "pipeline.recompute=never",
        ),
        22,
        _digits_read,
    ),
    "names": Task(
        find_recipe("names"),
        (
            "train.epochs=7",
            "train.average_checkpoints=1",
            "train.checkpoint_every=1000",
            'data.languages=["da", "nb", "nl", "sv"]',
            "data.low_resource=[]",
            "data.vocabulary_size=1000",
            "data.tokens_per_step=1024",
            "data.tokens_per_part=1024",
            "data.beam=1",
            "learning_rate.warmup_steps=100",
            "pipeline.partition=[6, 3]",
        ),
        8,
        _names_translated,
    ),
}
SCHEDULES = ("one_f_one_b", "pipedream_2bw", "pipedream")
SEEDS = (0, 1)


def score(task: Task, schedule: str, seed: int) -> str:
    """Train with a schedule; give how well what was not seen is read or translated.

    The norm of all gradients is not known where weights lag, so none are clipped.
    """
    with tempfile.TemporaryDirectory() as scratch:
        recipe, folder = Path(scratch) / task.recipe.name, Path(scratch) / "run"
        lines = task.recipe.read_text().splitlines()
        recipe.write_text("\n".join(x for x in lines if not x.startswith("max_grad_norm")))
        changes = [*task.alike, f"pipeline.schedule={schedule}", f"train.seed={seed}"]
        if schedule != "one_f_one_b":
            changes.append(f"train.window={task.window}")
        run = start_run(Request(recipe, changes, folder), Console(quiet=True), Interrupt())
        return task.score(run, folder)


def main() -> None:
    """Train each recipe with every schedule and seed; print a table of each."""
    for name in sys.argv[1:] or TASKS:
        print(f"\n| {name} | " + " | ".join(f"seed {seed}" for seed in SEEDS) + " |")
        print("|---" * (1 + len(SEEDS)) + "|")
        for schedule in SCHEDULES:
            progress(f"training {name} with {schedule}")
            found = [score(TASKS[name], schedule, seed) for seed in SEEDS]
            print(f"| `{schedule}` | " + " | ".join(found) + " |", flush=True)


if __name__ == "__main__":
    main()
