"""Runs on images in files: they go on bit by bit, and what cannot be read is named."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from penstock.errors import ConfigError
from penstock_recipes.errors import RunFolderError
from penstock_recipes.recipe.read import read_recipe, recipe_to_toml
from penstock_recipes.train.display import Display
from penstock_recipes.train.interrupt import Interrupt
from penstock_recipes.train.loop import Trainer
from penstock_recipes.train.run_folder import RunFolder, create
from penstock_recipes.zoo import DropPath
from tests.quiet import quiet
from tests.runs import assert_same_weights, resume, start, stopped

RECIPE = """
[model]
name = "amoebanet"
num_layers = 3
num_filters = 16
drop_path = 0.3
stem = "small"

[data]
name = "image_folder"
path = "PATH"
size = 12
policy = "randaugment"
cutout = 0.3
num_workers = 0

[pipeline]
num_stages = 2
partition = [3, 5]
num_microbatches = 2

[optimizer]
name = "rmsprop"
lr = 0.002

[learning_rate]
name = "exponential"
every_epochs = 1.0
factor = 0.5

[train]
epochs = 2
batch_size = 6
label_smoothing = 0.1
average_decay = 0.5
log_every = 1
checkpoint_every = 99
"""
CLASSES = ("dark", "light", "red")
DAMAGED = "train/light/3.png"


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make some images, of which one in each part is damaged behind its header."""
    folder, random = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for part, count in (("train", 4), ("val", 3)):
        for number, name in enumerate(CLASSES):
            (folder / part / name).mkdir(parents=True)
            for image in range(count):
                noise = random.integers(0, 60, (14 + image, 17, 3), dtype=np.uint8)
                pixels = noise + np.array([[0] * 3, [190] * 3, [190, 0, 0]][number], np.uint8)
                Image.fromarray(pixels).save(folder / part / name / f"{image}.png")
    for damaged in (folder / DAMAGED, folder / "val/red/1.png"):
        damaged.write_bytes(damaged.read_bytes()[:150])
    path = folder / "images.toml"
    path.write_text(RECIPE.replace("PATH", str(folder)))
    return path


@pytest.fixture(scope="module")
def uninterrupted(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "uninterrupted"
    assert start(recipe, [], folder).finished
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        ["pipeline.num_stages=1", "pipeline.partition=[8]"],
        ["pipeline.num_stages=3", "pipeline.partition=auto", "data.num_workers=1"],
    ],
    ids=" ".join,
)
def test_a_run_on_images_goes_on_bit_by_bit(recipe, uninterrupted, tmp_path, changes) -> None:
    folder = stopped(read_recipe(recipe), tmp_path / "run", 3)
    assert resume(folder.path, changes).finished
    assert_same_weights(folder.path, uninterrupted)
    scores = [list(RunFolder(f).read_metrics())[-1] for f in (folder.path, uninterrupted)]
    assert scores[0]["test_accuracy"] == scores[1]["test_accuracy"]


@pytest.mark.slow
def test_what_cannot_be_decoded_is_named_and_counts_nothing(uninterrupted: Path) -> None:
    named = (uninterrupted / "skipped.txt").read_text().splitlines()
    assert sorted(Path(name).parts[-3:] for name in named) == [
        ("train", "light", "3.png"),
        ("val", "red", "1.png"),
    ]
    accuracy = list(RunFolder(uninterrupted).read_metrics())[-1]["test_accuracy"]
    assert accuracy in {right / 8 for right in range(1, 8)}  # of nine, one cannot be read


@pytest.mark.slow
def test_what_cannot_be_decoded_is_counted(recipe: Path, uninterrupted: Path) -> None:
    lines = [m for m in RunFolder(uninterrupted).read_metrics() if m["kind"] == "epoch"]
    assert lines[-1]["num_skipped"] == 2


@pytest.mark.slow
def test_a_run_goes_on_with_the_images_that_it_began_with(recipe, uninterrupted, tmp_path) -> None:
    """Wherever they are now."""
    moved, folder = tmp_path / "moved", tmp_path / "run"
    for part in ("train", "val"):
        shutil.copytree(recipe.parent / part, moved / part)
    shutil.copytree(uninterrupted, folder)
    with pytest.raises(RunFolderError, match="there is nothing to resume"):
        resume(folder, [f"data.path={moved}"])
    for part in ("train", "val"):
        (moved / part / "dark").rename(moved / part / "pale")  # which is another class's number
    with pytest.raises(ConfigError, match=r"the data are not those that .* began with"):
        resume(folder, [f"data.path={moved}"])
    assert str(recipe.parent) in (folder / "recipe.toml").read_text()


@pytest.mark.slow
def test_a_run_without_an_image_to_be_judged_by_is_an_error(recipe: Path, tmp_path: Path) -> None:
    for part in ("train", "val"):
        shutil.copytree(recipe.parent / part, tmp_path / part)
    for file in (tmp_path / "val").rglob("*.png"):
        file.write_bytes(file.read_bytes()[:150])
    with pytest.raises(ConfigError, match="none of the 9 images to be judged by can be decoded"):
        start(recipe, [f"data.path={tmp_path}"], tmp_path / "run")


def test_one_sample_is_enough_where_batch_norm_sees_many_values_of_it(recipe: Path) -> None:
    given = ["train.batch_size=5", "model.auxiliary_weight=0", "data.size=32"]
    given.append("pipeline.partition=auto")  # without a head there are fewer layers
    Trainer(read_recipe(recipe, given)).close()


def test_drop_path_rises_from_nothing_over_the_run(recipe: Path, tmp_path: Path) -> None:
    seen: list[set[float]] = []

    class Watch(Display):
        def show_step(self, position: Any, meter: Any) -> None:
            parts = [part for part in trainer.model.modules() if isinstance(part, DropPath)]
            seen.append({part.progress for part in parts})

    with Trainer(read_recipe(recipe, ["train.epochs=1"])) as trainer:
        folder = create(tmp_path / "run", recipe_to_toml(trainer.recipe))
        trainer.run(folder, Watch(quiet(), 1, 3, trainer.task), Interrupt())
    assert seen == [{0.0}, {1 / 2}]


def test_what_cannot_be_decoded_ends_a_strict_run(recipe: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"3\.png cannot be decoded; remove or replace it"):
        start(recipe, ["data.strict=true"], tmp_path / "run")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("data.path=/nowhere", "/nowhere"),
        ("train.batch_size=5", "has one sample, of which the model's BatchNorm sees one value"),
        ("model.name=residual", "unknown key"),
        ("data.least_area=0", "data.least_area = 0 must be greater than 0"),
        ("data.policy=cutmix", 'must be "none" or "randaugment" or "autoaugment"'),
    ],
)
def test_what_cannot_work_is_refused_before_anything_runs(recipe, change, message) -> None:
    with pytest.raises(ConfigError) as caught:
        Trainer(read_recipe(recipe, [change]))
    assert message in str(caught.value)
