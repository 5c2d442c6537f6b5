"""Translation in many processes is the run of one, killed or not."""

import signal
from pathlib import Path

import pytest

from tests import runs
from tests.distributed.launch import ROOT, start
from tests.distributed.test_train_processes import (
    TRAIN,
    elastic,
    faulty,
    losses,
    run,
)
from tests.recipes.text_recipes import NAMES, TEXT

MADE = "translations.tsv"


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("recipes") / "names.toml"
    path.write_text(NAMES)
    return str(path)


@pytest.fixture(scope="module")
def uninterrupted(recipe: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one")
    run([*TRAIN, "train", recipe], folder)
    return folder / "runs" / "names-1"


def assert_same_run(folder: Path, expected: Path) -> None:
    runs.assert_same_run(folder, expected)
    assert (folder / MADE).read_text() == (expected / MADE).read_text()


@pytest.mark.slow
def test_two_processes_train_and_judge_the_same_model(recipe, uninterrupted, tmp_path) -> None:
    said = run(elastic([*faulty("kill", "1", 6), "train", recipe], processes=2), tmp_path)
    # After step 4 is the first epoch's end; its checkpoint may not have been whole.
    assert any(f"resuming runs/names-1 after step {step}" in said for step in (3, 4))
    assert_same_run(tmp_path / "runs" / "names-1", uninterrupted)


@pytest.mark.slow
def test_replicas_share_parts_that_have_fewer_rows_than_they_are(recipe, tmp_path) -> None:
    """With 64 tokens a part, some have one row; losses agree with one process but for rounding."""
    few = ("data.tokens_per_step=512", "data.tokens_per_part=64", "train.epochs=1")
    given = runs.sets(*few, "model.dropout=0")
    run([*TRAIN, "train", recipe, *given, "--run-folder", "one"], tmp_path)
    replicas = ["--set", "pipeline.num_replicas=3", "--num-processes", "6"]
    run([*TRAIN, "train", recipe, *given, *replicas, "--run-folder", "three"], tmp_path)
    assert losses(tmp_path / "three") == pytest.approx(losses(tmp_path / "one"), rel=1e-3)
    assert (tmp_path / "three" / MADE).is_file()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sharding", "with_all"),
    [
        ("megatron", "average_decay = 0.9"),
        ('{plan = "zero3+zero1", "blocks.*.narrow.weight" = "S(1)"}', "max_grad_norm = 0.5"),
    ],
)
def test_what_two_shards_began_goes_on_in_one_process(sharding, with_all, tmp_path) -> None:
    """A run that is cut off after four steps has the losses of one process, but for rounding."""
    text = TEXT.replace("PATH", str(ROOT / "README.md")).replace("epochs = 2", "epochs = 1")
    (tmp_path / "text.toml").write_text(text.replace("average_decay = 0.9", with_all))
    command = ["train", str(tmp_path / "text.toml"), "--set", "pipeline.num_stages=1"]
    run([*TRAIN, *command, "--run-folder", "one"], tmp_path)
    shards = ["--set", "pipeline.num_shards=2", "--set", f"pipeline.sharding={sharding}"]
    begun = tmp_path / "two"
    job = [*faulty("term", "1", 4), *command, *shards, "--run-folder", str(begun)]
    ended = start(2, job).wait(100)
    assert all(process.code == 128 + signal.SIGTERM for process in ended), ended
    said = run([*TRAIN, "train", "--resume", str(begun)], tmp_path)
    assert "after step 4, as 1 stage x 1 replica x 1 shard (before: 1 x 1 x 2)" in said
    ours, theirs = (
        [line for line in runs.curve(folder) if line["kind"] == "epoch"][-1]["valid_loss"]
        for folder in (begun, tmp_path / "one")
    )
    assert [*losses(begun), ours] == pytest.approx([*losses(tmp_path / "one"), theirs], rel=1e-4)
