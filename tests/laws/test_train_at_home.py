"""The recipes that run at home learn what their pages say, most in shorter variants."""

import json
import math
from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock_recipes.errors import DivergedError
from penstock_recipes.recipe.cookbook import find_recipe
from penstock_recipes.recipe.read import read_recipe
from penstock_recipes.train.command import Request, start_run
from penstock_recipes.train.interrupt import Interrupt
from penstock_recipes.train.loop import Trainer
from penstock_recipes.train.run_folder import RunFolder
from tests.digits import DIGITS
from tests.quiet import quiet

FEW = ("de", "nl", "nl", "sv", "no", "da", "es", "pt", "it", "fr", "ca", "gl")


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train AmoebaNet-D on the digits, with fewer filters than the recipe has."""
    folder = tmp_path_factory.mktemp("runs") / "digits"
    given = ["model.num_filters=16", "data.size=8", "data.max_shift=1", "train.epochs=10"]
    request = Request(find_recipe("digits_amoebanet"), given, folder)
    summary = start_run(request, quiet(), Interrupt())
    assert summary.scores["test_accuracy"] >= 0.95
    return folder


@pytest.mark.slow
def test_what_was_learnt_of_digits_helps_with_another_question(digits, tmp_path) -> None:
    """Which digits are odd, from four images of each: as many steps from both beginnings."""
    given = ["model.num_filters=16", "data.size=8", "data.max_shift=1"]
    starts = {
        "tuned": [f"start.checkpoint={digits}"],
        "scratch": ["start.checkpoint=", "start.new_layers=[]"],
    }
    found = {}
    for name, start in starts.items():
        request = Request(find_recipe("digits_parity"), [*given, *start], tmp_path / name)
        summary = start_run(request, quiet(), Interrupt())
        found[name] = summary.steps, summary.scores["test_accuracy"]
    assert found["tuned"][0] == found["scratch"][0] and found["tuned"][1] >= 0.85
    assert found["tuned"][1] > found["scratch"][1] + 0.1


@pytest.mark.slow
def test_one_model_of_several_languages_translates_names_of_one_with_few(tmp_path: Path) -> None:
    given = [f"data.languages={json.dumps(sorted(set(FEW)))}", 'data.low_resource=["gl"]']
    given += ['data.kinds=["territories", "languages"]', "data.vocabulary_size=700"]
    given += ["data.tokens_per_step=2048", "data.tokens_per_part=2048", "model.width=64"]
    given += ["model.head_width=16", "train.epochs=30", "learning_rate.warmup_steps=100"]
    folder = tmp_path / "names"
    assert start_run(Request(find_recipe("names"), given, folder), quiet(), Interrupt()).finished
    scores = json.loads((folder / "scores.json").read_text())
    for language in ("gl", "de"):
        assert scores["model"][language]["chrf"] > scores["copy"][language]["chrf"] + 10


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
