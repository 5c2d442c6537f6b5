"""`penstock train` with schedules that update weights while they run."""

from pathlib import Path

import pytest

from penstock_recipes.errors import RecipeError
from penstock_recipes.recipe.read import read_recipe
from penstock_recipes.train.run_folder import RunFolder
from tests.digits import DIGITS, NUM_STEPS
from tests.laws.test_train_resume import SMALL
from tests.runs import assert_same_run, curve, resume, start, stopped

TWO = [*SMALL, "pipeline.schedule=pipedream_2bw", "train.window=2"]
STASHED = [
    *SMALL,
    "pipeline.schedule=pipedream",
    "pipeline.partition=[4, 4]",
    "train.window=2",
    "optimizer.lr=0.001",
]


@pytest.mark.parametrize("changes", [TWO, STASHED], ids=["pipedream_2bw", "pipedream"])
def test_a_run_goes_on_bit_by_bit_from_where_a_window_ended(changes, tmp_path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    summary = start(DIGITS, changes, whole)
    assert summary.finished and summary.steps == NUM_STEPS
    stopped(read_recipe(DIGITS, changes), broken, 2)  # of windows of 2, 1, 2 and 1 batches
    layout = ["pipeline.recompute=never"]
    if changes is TWO:  # lags the same for every number of stages
        layout.append("pipeline.num_stages=3")
    assert resume(broken, layout).finished
    assert_same_run(broken, whole)


def test_checkpoints_are_saved_where_windows_end(tmp_path: Path) -> None:
    changes = [*TWO, "train.checkpoint_every=1"]
    folder = tmp_path / "run"
    assert start(DIGITS, changes, folder).finished
    steps = [int(path.name.split("-")[-1]) for path in RunFolder(folder).checkpoints()]
    assert steps == [2, 3, 5, 6]


def test_windows_of_one_batch_are_synchronous_training(tmp_path: Path) -> None:
    plain, window = tmp_path / "plain", tmp_path / "window"
    changes = [*SMALL, "pipeline.schedule=pipedream_2bw"]
    assert start(DIGITS, SMALL, plain).finished and start(DIGITS, changes, window).finished
    assert curve(plain) == curve(window)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("train.max_grad_norm=1.0", "the norm over all stages is not known"),
        ("train.precision=float16", "has overflowed is not known"),
        ("train.average_decay=0.9", "average is taken when all weights are of one update"),
        ("pipeline.num_replicas=2", "wait for the gradients of all replicas"),
        ("pipeline.schedule=pipedream", "depends on its stage; list the layers"),
        ("pipeline.schedule=gpipe", "ends every batch with a flush"),
    ],
)
def test_what_cannot_be_as_asked_is_refused_with_the_reason(change: str, said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        read_recipe(DIGITS, [*TWO, change])


def test_a_run_whose_weights_lag_cannot_go_on_with_another_lag(tmp_path: Path) -> None:
    folder = stopped(read_recipe(DIGITS, TWO), tmp_path / "run", 2)
    with pytest.raises(RecipeError, match=r"train\.window was 2 and cannot become 3"):
        resume(folder.path, ["train.window=3"])
    other = ["pipeline.schedule=pipedream", "pipeline.partition=[4, 4]"]
    with pytest.raises(RecipeError, match=r"pipeline\.schedule was"):
        resume(folder.path, other)
