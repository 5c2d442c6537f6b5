"""What a trained run scored, once more and to the bit; what its model makes of inputs."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from penstock.errors import ConfigError
from penstock_recipes.commands.eval import WHICH, evaluate
from penstock_recipes.commands.predict import predict
from penstock_recipes.data.image_sets import digit_images
from penstock_recipes.errors import RecipeError, RunFolderError
from penstock_recipes.recipe.read import read_recipe, recipe_to_toml
from penstock_recipes.train.command import Request
from penstock_recipes.train.evaluate import evaluate_run, predict_by
from penstock_recipes.train.run_folder import RunFolder, Which, create
from tests.digits import DIGITS, TWO_EPOCHS
from tests.quiet import quiet
from tests.recipes.text_recipes import NAMES, TEXT
from tests.runs import curve, start

LAYOUTS: Any = (
    [],
    ["pipeline.num_stages=1"],
    ["pipeline.num_stages=3", "pipeline.schedule=gpipe"],
)


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose third epoch is not its best, with averaged weights."""
    folder = tmp_path_factory.mktemp("runs") / "digits"
    changes = ["train.epochs=4", "optimizer.lr=0.05", "train.average_decay=0.5"]
    assert start(DIGITS, [*TWO_EPOCHS, *changes], folder).finished
    return folder


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs of a translation and of a language model."""
    folder = tmp_path_factory.mktemp("texts")
    lines = (f"The square of {n} is {n * n}.\n" for n in range(400))
    (folder / "text.txt").write_text("".join(lines))
    recipes = {"names": NAMES, "text": TEXT.replace("PATH", str(folder / "text.txt"))}
    for name, recipe in recipes.items():
        (folder / f"{name}.toml").write_text(recipe)
        changes = ["train.average_checkpoints=1", "train.epochs=1"]
        assert start(folder / f"{name}.toml", changes, folder / name).finished
    return {name: folder / name for name in recipes}


def scores_after(folder: Path, epoch: int) -> dict[str, Any]:
    (line,) = (x for x in curve(folder) if x["kind"] == "epoch" and x["epoch"] == epoch)
    return {name: score for name, score in line.items() if name.startswith("test_")}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS, ids=["as-trained", "one-stage", "three-stages"])
def test_scores_are_those_of_the_run_for_any_number_of_stages(digits: Path, layout) -> None:
    best = json.loads((digits / "best.json").read_text())["epoch"]
    for which, epoch in ((Which.BEST, best), (Which.NEWEST, 4)):
        found = evaluate_run(Request(None, layout, digits), which, quiet())
        assert found.scores == scores_after(digits, epoch) and found.epoch == epoch


@pytest.mark.slow
def test_the_command_names_the_checkpoint_and_changes_no_file(digits: Path) -> None:
    def files() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in digits.rglob("*") if path.is_file()}

    before = files()
    done = CliRunner().invoke(evaluate, [str(digits), "--checkpoint", "newest", "--json"])
    facts = json.loads(done.stdout)
    assert facts["checkpoint"].endswith("step-000012") and facts["step"] == 12
    assert facts["test_accuracy"] == scores_after(digits, 4)["test_accuracy"]
    done = CliRunner().invoke(evaluate, [str(digits), "--checkpoint", "newest"])
    assert done.stdout.splitlines()[1].startswith("test accuracy: ")
    assert files() == before
    assert [which.value for which in Which] == list(WHICH)


def test_the_classes_of_the_test_images_are_those_that_were_counted(digits: Path) -> None:
    rows = [line.split("\t") for line in predict_by(digits, (), Which.NEWEST)]
    hits = [predicted == truth for _, predicted, _, truth in rows]
    assert rows[0][0] == "test image 0" and len(rows) == 359
    assert sum(hits) / len(hits) == scores_after(digits, 4)["test_accuracy"]


def test_an_image_file_is_seen_as_the_test_images_are(digits: Path, tmp_path: Path) -> None:
    pillow = pytest.importorskip("PIL.Image")
    images = digit_images(size=8)
    ((inputs, _),) = images.tests(range(9), 9)
    for number, image_HW in enumerate(inputs[:, 0]):
        pixels = (image_HW * 255).round().to(torch.uint8).numpy()
        pillow.fromarray(pixels).save(tmp_path / f"{number}.png")
    files = [str(tmp_path / f"{number}.png") for number in range(9)]
    done = CliRunner().invoke(predict, [str(digits), *files])
    rows = [line.split("\t") for line in done.stdout.splitlines()]
    assert [row[0] for row in rows] == files
    expected = [line.split("\t")[1] for line in predict_by(digits, (), Which.BEST)]
    assert [row[1] for row in rows] == expected[:9]
    (tmp_path / "no.png").write_text("no image")
    for name in ("no.png", "none.png"):
        with pytest.raises(ConfigError, match=f"cannot read the image .*{name}"):
            list(predict_by(digits, [str(tmp_path / name)], Which.BEST))


@pytest.mark.slow
def test_lines_are_translated_as_the_test_texts_were(texts: dict[str, Path]) -> None:
    lines = (texts["names"] / "translations.tsv").read_text().splitlines()
    rows = [line.split("\t") for line in lines][::5]  # of all languages, mixed
    given = "\n".join(f"{language}: {source}" for language, source, *_ in reversed(rows))
    arguments = [str(texts["names"]), "-", "--checkpoint", "newest"]
    done = CliRunner().invoke(predict, arguments, input=given)
    assert done.exit_code == 0, done.exception
    assert done.stdout.splitlines() == [row[-1] for row in reversed(rows)]
    with pytest.raises(RecipeError, match="'Haus' does not say its language; write de: before it"):
        list(predict_by(texts["names"], ["Haus"], Which.BEST))
    with pytest.raises(RecipeError, match="give the texts to translate"):
        list(predict_by(texts["names"], [], Which.BEST))


@pytest.mark.slow
def test_a_text_is_continued_as_at_the_end_of_the_run(texts: dict[str, Path]) -> None:
    (text,) = predict_by(texts["text"], [], Which.NEWEST)
    assert text + "\n" == (texts["text"] / "sample.txt").read_text()
    (other,) = predict_by(texts["text"], ["The square"], Which.NEWEST)
    assert other.startswith("The square") and len(other) > len("The square")
    with pytest.raises(RecipeError, match="an empty text cannot be continued"):
        list(predict_by(texts["text"], [""], Which.NEWEST))


def test_what_is_no_trained_run_is_refused(digits: Path, tmp_path: Path) -> None:
    for name, make in {
        "evaluate": lambda path: evaluate_run(Request(None, (), path), Which.BEST, quiet()),
        "predict": lambda path: list(predict_by(path, (), Which.BEST)),
    }.items():
        with pytest.raises(RunFolderError, match=f"cannot {name}: .* does not exist"):
            make(tmp_path / "none")
        new = create(tmp_path / name, recipe_to_toml(read_recipe(DIGITS, TWO_EPOCHS)))
        with pytest.raises(RunFolderError, match="has no checkpoint yet"):
            make(new.path)
    with pytest.raises(RecipeError, match=r"model\.width was 4 and cannot become 8"):
        evaluate_run(Request(None, ["model.width=8"], digits), Which.BEST, quiet())


def test_without_a_best_checkpoint_the_newest_is_taken(digits: Path) -> None:
    folder = RunFolder(digits, writes=False)
    assert folder.chosen(Which.BEST) == folder.best()
    assert folder.chosen(Which.NEWEST).name == "step-000012" != folder.chosen(Which.BEST).name
