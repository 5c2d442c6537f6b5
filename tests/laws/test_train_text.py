"""Runs on text that stop and go on are those that never stopped, in every other layout."""

import csv
import json
import math
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.errors import CheckpointError, ConfigError
from penstock_recipes.errors import RecipeError, RunFolderError
from penstock_recipes.recipe.read import read_recipe
from penstock_recipes.train.loop import Trainer
from penstock_recipes.train.run_folder import RunFolder
from penstock_recipes.train.weights import mean_weights, tensor_names
from tests.recipes.text_recipes import NAMES, TEXT
from tests.runs import assert_same_run, curve, resume, start, stopped


@pytest.fixture(scope="module")
def recipes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("recipes")
    text = "".join(f"line {n}: {n * n} is the square of {n}.\n" for n in range(160))
    (folder / "text.txt").write_text(text)
    found = {"names": NAMES, "text": TEXT.replace("PATH", str(folder / "text.txt"))}
    for name, content in found.items():
        (folder / f"{name}.toml").write_text(content)
    return {name: folder / f"{name}.toml" for name in found}


@pytest.fixture(scope="module")
def uninterrupted(
    recipes: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    folders = {name: tmp_path_factory.mktemp("runs") / name for name in recipes}
    for name, recipe in recipes.items():
        assert start(recipe, [], folders[name]).finished
    return folders


ONE = ["pipeline.num_stages=1"]
THREE = ["pipeline.num_stages=3", "pipeline.schedule=one_f_one_b"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "stop", "changes"),
    [
        ("names", 4, ONE),
        ("text", 4, THREE),
        ("names", 1, THREE),
        ("text", 6, ONE),
    ],
)
def test_it_goes_on_bit_by_bit(recipes, uninterrupted, tmp_path, name, stop, changes) -> None:
    folder = stopped(read_recipe(recipes[name]), tmp_path / "run", stop)
    assert resume(folder.path, changes).finished
    assert_same_run(folder.path, uninterrupted[name])
    made = {"names": "translations.tsv", "text": "sample.txt"}[name]
    assert (folder.path / made).read_text() == (uninterrupted[name] / made).read_text()


def test_what_is_made_of_a_translation_run(uninterrupted: dict[str, Path]) -> None:
    folder = uninterrupted["names"]
    with (folder / "translations.tsv").open(encoding="utf-8", newline="") as file:
        lines = list(csv.reader(file, "excel-tab"))
    assert {line[0] for line in lines} == {"de", "nl", "uk"}
    assert all(len(line) == 4 for line in lines)
    scores = json.loads((folder / "scores.json").read_text())
    assert scores.keys() == {"copy", "model"}
    assert scores["copy"]["nl"]["chrf"] > scores["copy"]["uk"]["chrf"]  # one alphabet, two
    assert (folder / "vocabulary.json").is_file()


@pytest.mark.parametrize("name", ["names", "text"])
def test_what_is_made_of_a_run_is_of_the_weights_it_was_judged_by(
    recipes: dict[str, Path], uninterrupted: dict[str, Path], name: str
) -> None:
    """Tied matrices too, whose average is kept under one of their names."""
    with Trainer(read_recipe(uninterrupted[name] / "recipe.toml")) as trainer:
        folder = RunFolder(uninterrupted[name], writes=False)
        trainer.resume(folder)
        averages = trainer._average.in_place() if trainer._average is not None else nullcontext()
        with averages:
            judged = {n: t.clone() for n, t in trainer.model.state_dict().items()}
        names = tensor_names(trainer.model)
        assert len(set(names.values())) < len(names)  # some are tied
        found = dict(mean_weights(folder.checkpoints()[-1:], names))
        assert found.keys() == judged.keys()
        assert all(torch.equal(found[n], judged[n]) for n in judged)
        both = dict(mean_weights(folder.checkpoints()[:1] * 3, names))
        alone = dict(mean_weights(folder.checkpoints()[:1], names))
        assert all(torch.equal(both[n], alone[n]) for n in both)


@pytest.mark.parametrize(
    ("name", "made"),
    [
        pytest.param("names", "scores.json", marks=pytest.mark.slow, id="names"),
        pytest.param("text", "sample.txt", id="text"),
    ],
)
def test_what_was_not_made_of_a_finished_run_is_made_when_it_is_resumed(
    uninterrupted: dict[str, Path], tmp_path: Path, name: str, made: str
) -> None:
    folder = shutil.copytree(uninterrupted[name], tmp_path / "run")
    expected = (folder / made).read_text()
    (folder / made).unlink()
    assert resume(folder).finished and (folder / made).read_text() == expected
    with pytest.raises(RunFolderError, match="there is nothing to resume"):
        resume(folder)


def test_a_run_goes_on_with_the_text_that_it_began_with(uninterrupted: Any, tmp_path: Any) -> None:
    folder = shutil.copytree(uninterrupted["text"], tmp_path / "run")
    recipe = (folder / "recipe.toml").read_text()
    path = Path(read_recipe(folder / "recipe.toml").data.path)  # type: ignore[union-attr]
    (tmp_path / "text.txt").write_text(path.read_text().replace("square", "SQUARE"))
    (folder / "recipe.toml").write_text(recipe.replace(str(path), str(tmp_path / "text.txt")))
    (folder / "sample.txt").unlink()
    with pytest.raises(ConfigError, match=r"the data are not those that .* began with"):
        resume(folder)
    (folder / "data.digest").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"began with, as .*data\.digest says"):
        resume(folder)


def test_weights_without_their_vocabulary_are_refused(recipes, uninterrupted, tmp_path) -> None:
    for name in recipes:
        folder = shutil.copytree(uninterrupted[name], tmp_path / name)
        (folder / "vocabulary.json").unlink()
        with pytest.raises(CheckpointError, match="nobody knows what the weights' tokens mean"):
            Trainer(read_recipe(recipes[name], [f"start.checkpoint={folder}"]))


def test_a_run_on_other_text_starts_from_weights_and_their_vocabulary(
    recipes: dict[str, Path], uninterrupted: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "other.txt").write_text("It is another text, of other words.\n" * 40)
    begun = uninterrupted["text"]
    given = [f"start.checkpoint={begun}", f"data.path={tmp_path / 'other.txt'}"]
    with pytest.raises(CheckpointError, match="was trained with a vocabulary of"):
        Trainer(read_recipe(recipes["text"], given))
    given.append(f"data.vocabulary={begun / 'vocabulary.json'}")
    with Trainer(read_recipe(recipes["text"], given)) as trainer:
        names = tensor_names(trainer.model)
        expected = dict(mean_weights(RunFolder(begun).checkpoints()[-1:], names))
        found = trainer.pipe.state_dict()
        assert all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.parametrize(
    ("name", "change"), [("names", "data.seed=1"), ("text", "data.valid_share=0.2")]
)
def test_weights_that_have_learnt_what_is_held_out_are_refused(
    recipes: dict[str, Path], uninterrupted: dict[str, Path], name: str, change: str
) -> None:
    vocabulary = uninterrupted[name] / "vocabulary.json"
    given = [f"start.checkpoint={uninterrupted[name]}", f"data.vocabulary={vocabulary}", change]
    with pytest.raises(RecipeError, match="they have learnt from what this run would be judged"):
        Trainer(read_recipe(recipes[name], given))


@pytest.mark.slow
def test_a_fine_tuned_run_goes_on_without_the_run_that_it_began_with(
    recipes: dict[str, Path], uninterrupted: dict[str, Path], tmp_path: Path
) -> None:
    old = shutil.copytree(uninterrupted["text"], tmp_path / "old")
    given = [f"start.checkpoint={old}", "train.checkpoint_every=2"]
    folder = stopped(read_recipe(recipes["text"], given), tmp_path / "run", 1)
    shutil.rmtree(old)
    assert resume(folder.path).finished


def test_a_run_learns(uninterrupted: dict[str, Path]) -> None:
    for folder in uninterrupted.values():
        losses = [line["valid_loss"] for line in curve(folder) if line["kind"] == "epoch"]
        assert losses[-1] < losses[0]
    last = curve(uninterrupted["text"])[-1]
    assert last["valid_perplexity"] == pytest.approx(math.exp(last["valid_loss"]))


def test_a_step_weighs_its_parts_by_their_words(recipes: dict[str, Path]) -> None:
    """The gradient of a step is that of its parts at once, but for rounding."""
    given = ["model.dropout=0", "pipeline.num_stages=1", "train.average_checkpoints=1"]
    given += ["data.tokens_per_step=4000", "data.tokens_per_part=500"]
    with Trainer(read_recipe(recipes["names"], given)) as trainer:
        batch = next(trainer.task.batches(0, 0, slice))
        assert len(batch.parts) == 8 and math.isclose(sum(p.share for p in batch.parts), 1)
        for part in batch.parts:
            trainer.pipe.train_step(part.inputs, part.targets, loss_scale=part.share)
        found = [p.grad.clone() for p in trainer.model.parameters() if p.grad is not None]
        trainer.optimizer.zero_grad()
        losses = [
            trainer.task.loss(trainer.model(*part.inputs), part.targets) * (part.targets > 0).sum()
            for part in batch.parts
        ]
        (sum(losses[1:], losses[0]) / batch.count).backward()
        expected = [p.grad for p in trainer.model.parameters() if p.grad is not None]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-7)


def test_weights_of_another_vocabulary_are_refused(recipes: Any, uninterrupted: Any) -> None:
    given = [f"start.checkpoint={uninterrupted['names']}", "data.vocabulary_size=280"]
    with pytest.raises(CheckpointError, match="was trained with a vocabulary of 300 tokens"):
        Trainer(read_recipe(recipes["names"], given))


def test_a_run_that_goes_on_needs_the_same_vocabulary(recipes, uninterrupted, tmp_path) -> None:
    with Trainer(read_recipe(recipes["names"], ["data.vocabulary_size=280"])) as trainer:
        with pytest.raises(ConfigError, match="is not this vocabulary; it is never overwritten"):
            trainer.task.begin(uninterrupted["names"])
        trainer.task.begin(tmp_path)
    assert (tmp_path / "vocabulary.json").is_file()


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("names", ["model.name=gpt"], "unknown key model.ff_width"),
        ("text", ["data.path=/nowhere.txt"], "/nowhere.txt does not exist; give a text file"),
        ("text", ["data.length=100000"], "give a longer text"),
        ("names", ['data.languages=["de", "qq"]', "data.low_resource=[]"], "no language 'qq'"),
        ("names", ["data.max_length=2", "data.too_long=refuse"], "longer than the 2 tokens"),
        ("names", ["data.max_length=2"], "no text of at most 2 tokens is in the part 'train'"),
        ("names", ["train.batch_size=4"], "counts samples, and data.name"),
        ("names", ["train.drop_last=true"], "has nothing to leave out"),
        ("names", ["start.checkpoint=/nowhere"], '"/nowhere" does not exist; give the folder'),
        ("text", ["train.keep_checkpoints=1", "train.average_checkpoints=2"], "to be as high"),
        ("names", ["data.tokens_per_part=8192"], "a step at least one part"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_runs(recipes, name, changes, message) -> None:
    with pytest.raises((RecipeError, ConfigError)) as caught:
        Trainer(read_recipe(recipes[name], changes))
    assert message in " ".join(str(caught.value).split())
