"""Translation in many processes is the run of one, killed or not."""

from pathlib import Path

import pytest
import torch

from penstock.checkpoint.files import read_tensors
from penstock.train.run_folder import RunFolder
from tests.distributed.test_train_processes import (
    TRAIN,
    begin,
    curve,
    elastic,
    faulty,
    losses,
    outcome,
    run,
)
from tests.text_recipes import NAMES

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
    assert curve(folder) == curve(expected)
    ours, theirs = (
        {
            name: tensor
            for file in ("model.safetensors", "optimizer.safetensors")
            for name, tensor in read_tensors(RunFolder(f).checkpoints()[-1], file).items()
        }
        for f in (folder, expected)
    )
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert (folder / MADE).read_text() == (expected / MADE).read_text()


@pytest.mark.slow
def test_a_killed_run_goes_on_bit_by_bit(recipe: str, uninterrupted: Path, tmp_path: Path) -> None:
    code, said = outcome(begin([*faulty("kill", "0", 5), "train", recipe], tmp_path))
    assert code != 0, said
    run([*TRAIN, "train", "--resume", "runs/names-1"], tmp_path)
    assert_same_run(tmp_path / "runs" / "names-1", uninterrupted)


@pytest.mark.slow
def test_two_processes_train_and_judge_the_same_model(
    recipe: str, uninterrupted: Path, tmp_path: Path
) -> None:
    said = run(elastic([*faulty("kill", "1", 6), "train", recipe], processes=2), tmp_path)
    assert "resuming runs/names-1 after step 3" in said
    assert_same_run(tmp_path / "runs" / "names-1", uninterrupted)


@pytest.mark.slow
def test_replicas_share_parts_that_have_fewer_rows_than_they_are(
    recipe: str, tmp_path: Path
) -> None:
    """With 64 tokens a part, some have one row; losses agree with one process but for rounding."""
    few = ("data.tokens_per_step=512", "data.tokens_per_part=64", "train.epochs=1")
    given = [word for change in (*few, "model.dropout=0") for word in ("--set", change)]
    run([*TRAIN, "train", recipe, *given, "--run-folder", "one"], tmp_path)
    replicas = ["--set", "pipeline.num_replicas=3", "--num-processes", "6"]
    run([*TRAIN, "train", recipe, *given, *replicas, "--run-folder", "three"], tmp_path)
    assert losses(tmp_path / "three") == pytest.approx(losses(tmp_path / "one"), rel=1e-3)
    assert (tmp_path / "three" / MADE).is_file()
