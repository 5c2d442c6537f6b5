"""Runs of recipes: begun, stopped on the way, resumed, and compared with others."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from penstock_recipes.recipe.read import recipe_to_toml
from penstock_recipes.recipe.recipe import Recipe
from penstock_recipes.train.command import Request, resume_run, start_run
from penstock_recipes.train.display import Display
from penstock_recipes.train.interrupt import Interrupt
from penstock_recipes.train.loop import Trainer
from penstock_recipes.train.run_folder import RunFolder, create
from penstock_recipes.train.scalars import Summary
from tests.quiet import quiet
from tests.side_by_side import saved_tensors

ROOT = Path(__file__).parents[1]


def start(recipe: Path, changes: Sequence[str], folder: Path) -> Summary:
    return start_run(Request(recipe, changes, folder), quiet(), Interrupt())


def resume(folder: Path, changes: Sequence[str] = (), recipe: Path | None = None) -> Summary:
    return resume_run(Request(recipe, changes, folder), quiet(), Interrupt())


def sets(*changes: str) -> list[str]:
    return [word for change in changes for word in ("--set", change)]


def begin(
    arguments: Sequence[str], folder: Path, stderr: int = subprocess.STDOUT
) -> "subprocess.Popen[str]":
    """Begin `python ARGUMENTS` in a folder, in a process of its own."""
    path = f"{ROOT}{os.pathsep}{ROOT / 'recipes'}"
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
    )


def train_until(trainer: Trainer, folder: RunFolder, step: int) -> None:
    """Train up to `step` steps, as if Ctrl-C were pressed during the last of them."""
    interrupt = Interrupt()

    class Stop(Display):
        def show_step(self, position: Any, meter: Any) -> None:
            interrupt.number = signal.SIGINT if position.step >= step else 0

    trainer.run(folder, Stop(quiet(), 2, 3, trainer.task), interrupt)
    assert trainer.position.step == step and not trainer.finished


def stopped(recipe: Recipe, path: Path, step: int) -> RunFolder:
    """Begin a run that is stopped after so many steps."""
    folder = create(path, recipe_to_toml(recipe))
    with Trainer(recipe) as trainer:
        train_until(trainer, folder, step)
    return folder


def curve(folder: Path) -> list[dict[str, Any]]:
    """Read the metrics but for those that a clock decides."""
    lines = RunFolder(folder).read_metrics()
    return [{k: v for k, v in line.items() if k != "samples_per_s"} for line in lines]


def assert_same_weights(folder: Path, expected: Path) -> None:
    """Compare the models and optimizers of the newest checkpoints, bit by bit."""
    newest = [RunFolder(path).checkpoints()[-1] for path in (folder, expected)]
    assert newest[0].name == newest[1].name
    ours, theirs = map(saved_tensors, newest)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def assert_same_run(folder: Path, expected: Path) -> None:
    assert curve(folder) == curve(expected)
    assert_same_weights(folder, expected)
