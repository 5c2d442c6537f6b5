"""The recipe that ships with Penstock learns to read digits."""

import math
from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock_recipes.errors import DivergedError
from penstock_recipes.recipe.read import read_recipe
from penstock_recipes.train.command import Request, start_run
from penstock_recipes.train.interrupt import Interrupt
from penstock_recipes.train.loop import Trainer
from penstock_recipes.train.run_folder import RunFolder
from tests.digits import DIGITS
from tests.quiet import quiet


def test_a_run_that_diverges_ends_and_says_so(tmp_path: Path) -> None:
    given = ["model.num_blocks=1", "model.width=4", "optimizer.lr=1e30", "train.log_every=1"]
    with pytest.raises(DivergedError, match=r"loss is (nan|inf) in step \d+, at a learning rate"):
        start_run(Request(DIGITS, given, tmp_path / "run"), quiet(), Interrupt())
    logged = list(RunFolder(tmp_path / "run").read_metrics())
    assert all(math.isfinite(line["loss"]) for line in logged)


@pytest.mark.parametrize("share", ["0.0001", "0.9999"])
def test_a_split_that_leaves_nothing_is_refused_before_anything_runs(share: str) -> None:
    recipe = read_recipe(DIGITS, [f"data.test_share={share}"])
    with pytest.raises(ConfigError, match=r"choose another data\.test_share"):
        Trainer(recipe)


@pytest.mark.slow
def test_two_stages_read_at_least_97_of_100_unseen_digits(tmp_path: Path) -> None:
    summary = start_run(Request(DIGITS, [], tmp_path / "run"), quiet(), Interrupt())
    assert summary.finished and len(summary.stages) == 2
    assert summary.scores["test_accuracy"] >= 0.97
