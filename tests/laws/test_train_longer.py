"""A run goes on for longer, keeps its best checkpoint, and ends when it gets no better."""

import json
from pathlib import Path

import pytest

from penstock_recipes.errors import RecipeError, RunFolderError
from penstock_recipes.recipe.read import read_recipe
from penstock_recipes.train.position import Position, why_ended
from penstock_recipes.train.run_files import BEST
from penstock_recipes.train.run_folder import RunFolder
from penstock_recipes.train.tasks.task import Measure
from tests.digits import DIGITS, TWO_EPOCHS
from tests.runs import assert_same_run, curve, resume, start, stopped

SMALL = (*TWO_EPOCHS, "train.trace_every=1")
LOSS = Measure("loss", "loss", higher_is_better=False)


def epochs_of(folder: Path) -> list[dict[str, float]]:
    return [line for line in curve(folder) if line["kind"] == "epoch"]


@pytest.mark.slow
def test_a_longer_run_is_the_straight_one_where_the_learning_rate_is_the_same(
    tmp_path: Path,
) -> None:
    """A rate that was made for two epochs keeps its final value in the third."""
    straight, longer = tmp_path / "straight", tmp_path / "longer"
    made_for_two = [*SMALL, "learning_rate.epochs=2", "learning_rate.final_share=0.1"]
    assert start(DIGITS, [*made_for_two, "train.epochs=3"], straight).finished
    assert start(DIGITS, [*SMALL, "learning_rate.final_share=0.1"], longer).finished
    assert resume(longer, ["train.epochs=3", "learning_rate.epochs=2"]).steps == 9
    assert_same_run(longer, straight)


@pytest.mark.slow
def test_the_learning_rate_of_a_longer_run_is_its_own_from_then_on(tmp_path: Path) -> None:
    long, longer = tmp_path / "long", tmp_path / "longer"
    assert start(DIGITS, [*SMALL, "train.epochs=3"], long).finished
    stopped(read_recipe(DIGITS, SMALL), longer, 5)
    assert resume(longer, ["train.epochs=3"]).finished
    rates = [[x["learning_rate"] for x in curve(f) if x["kind"] == "step"] for f in (longer, long)]
    assert rates[0][5:] == rates[1][5:]
    assert rates[0][:5] != rates[1][:5]
    assert read_recipe(longer / "recipe.toml").train.epochs == 3


def test_fewer_epochs_than_are_trained_are_refused(tmp_path: Path) -> None:
    folder = stopped(read_recipe(DIGITS, SMALL), tmp_path / "run", 4)
    with pytest.raises(RunFolderError, match=r"has begun 2 epochs already.* cannot become 1"):
        resume(folder.path, ["train.epochs=1"])
    assert read_recipe(folder.recipe_path).train.epochs == 2
    with pytest.raises(RecipeError, match=r"optimizer\.lr was 0\.005 and cannot become 0\.1"):
        resume(folder.path, ["train.epochs=3", "optimizer.lr=0.1"])


@pytest.mark.slow
def test_the_best_checkpoint_is_kept_beside_the_newest(tmp_path: Path) -> None:
    changes = [*SMALL, "train.keep_checkpoints=1", "train.epochs=4", "optimizer.lr=0.05"]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert start(DIGITS, changes, whole).finished
    facts = json.loads((whole / BEST).read_text())
    scores = [line["test_accuracy"] for line in epochs_of(whole)]
    first_best = 1 + scores.index(max(scores))
    assert facts == {
        "checkpoint": f"checkpoints/step-{3 * first_best:06d}",
        "measure": "test_accuracy",
        "epoch": first_best,
        "step": 3 * first_best,
        "score": max(scores),
    }
    kept = {path.name for path in RunFolder(whole).checkpoints()}
    assert kept == {f"step-{3 * first_best:06d}", "step-000012"}
    # A run that was stopped on the way has the same.
    stopped(read_recipe(DIGITS, changes), broken, 8)
    assert resume(broken).finished
    assert (broken / BEST).read_text() == (whole / BEST).read_text()
    assert {path.name for path in RunFolder(broken).checkpoints()} == kept
    assert_same_run(broken, whole)


@pytest.mark.slow
def test_a_run_ends_when_it_gets_no_better_and_goes_on_counting_with_more_patience(
    tmp_path: Path,
) -> None:
    # The learning rate is so low that no test sample changes its class.
    changes = [*SMALL, "train.epochs=4", "optimizer.lr=1e-9"]
    whole, early = tmp_path / "whole", tmp_path / "early"
    assert start(DIGITS, changes, whole).epochs == 4
    summary = start(DIGITS, [*changes, "train.patience=1"], early)
    assert summary.finished and summary.epochs == 2
    with pytest.raises(RunFolderError, match="has ended early, after epoch 2: the test accuracy"):
        resume(early)
    summary = resume(early, ["train.patience=2"])
    assert summary.finished and summary.epochs == 3
    assert resume(early, ["train.patience=9"]).epochs == 4
    assert_same_run(early, whole)


def test_of_losses_the_lowest_is_best_and_no_infinite_score_is() -> None:
    section = read_recipe(DIGITS, [*SMALL, "train.epochs=9", "train.patience=2"]).train
    position, losses = Position(), [float("nan"), 2.0, 1.0, float("inf"), 1.0]
    ended = []
    for loss in losses:
        position = position.after_epoch({"loss": loss}, LOSS)
        ended.append(bool(why_ended(position, section, LOSS)))
    assert position.best is not None and position.best.epoch == 3
    assert ended == [False, False, False, False, True]
