"""A recipe that cannot work is refused in one line that says where, what, and what to write."""

import json
import re
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from penstock.schedules.names import SCHEDULE_NAMES
from penstock_recipes.errors import RecipeError
from penstock_recipes.recipe.cookbook import find_recipe
from penstock_recipes.recipe.read import (
    FREE_ON_RESUME,
    check_resumable,
    read_recipe,
    recipe_to_toml,
)
from penstock_recipes.recipe.recipe import Recipe
from penstock_recipes.recipe.section import Section

DIGITS, GPT_SMALL = find_recipe("digits"), find_recipe("gpt_small")


def refused(path: Path, *overrides: str) -> str:
    """Give the message with which a recipe is refused."""
    with pytest.raises(RecipeError) as caught:
        read_recipe(path, overrides)
    return str(caught.value)


def written(folder: Path, text: str) -> Path:
    path = folder / "recipe.toml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    "override, message",
    [
        ("pipeline.num_stage=3", "key pipeline.num_stage; did you mean pipeline.num_stages?"),
        ("optimizer.wieght_decay=1", "did you mean optimizer.weight_decay?"),
        ("train.num_stages=3", "unknown key train.num_stages; did you mean pipeline.num_stages?"),
        ("train.qqqq=1", "unknown key train.qqqq; known: epochs, batch_size, "),
        ("optimizer.momentum=0.9", 'optimizer.name = "adamw"; it belongs to name = "sgd"'),
        ("pipelin.num_stages=3", "unknown section [pipelin]; did you mean pipeline?"),
        ("num_stages.x=3", "[num_stages]; did you mean the key pipeline.num_stages?"),
        *(
            (override, f"--set {override}: write section.key=value")
            for override in ("num_stages=3", "num_stages", "pipeline.=3", "x={}")
        ),
        ("train.epochs=ten", 'train.epochs = "ten" must be a valid integer'),
        ("train.epochs='10'", 'train.epochs = "10" must be a valid integer'),
        ("train.epochs=2.5", "train.epochs = 2.5 must be a valid integer"),
        ("train.epochs=true", "train.epochs = true must be a valid integer"),
        ("train.seed=-1", "train.seed = -1 must be greater than or equal to 0"),
        (f"train.seed={2**63}", f"{2**63} must be less than or equal to {2**63 - 1}"),
        (f"data.seed={2**64}", f"{2**64} must be less than or equal to {2**63 - 1}"),
        ("pipeline.num_stages=0", "pipeline.num_stages = 0 must be greater than or equal to 1"),
        ("pipeline.num_microbatches=0", "pipeline.num_microbatches = 0 must be greater than"),
        ("model.dropout=1", "model.dropout = 1 must be less than 1"),
        ("optimizer.lr=nan", "optimizer.lr = NaN must be a finite number"),
        (
            "model.name=residul",
            'model.name = "residul" must be "residual" or "amoebanet" or '
            '"translation_transformer" or "gpt"; did you mean residual?',
        ),
        ("optimizer.name=adam", 'optimizer.name = "adam" must be "adamw" or "sgd" or "rmsprop"'),
        (
            "pipeline.schedule=gpip",
            f'"gpip" must be {" or ".join(map(json.dumps, SCHEDULE_NAMES))}; did you mean gpipe?',
        ),
        ("pipeline.recompute=always", '"always" must be "stage" or "never"'),
        ("pipeline.memory_limit_bytes=0", "memory_limit_bytes = 0 must be greater than or equal"),
        ("pipeline.memory_limit_bytes=1e9", "memory_limit_bytes = 1000000000.0 must be a valid"),
        ("pipeline.offload=always", 'pipeline.offload = "always" must be a valid boolean'),
        ("pipeline.partition=[0, 11]", 'partition = [0, 11] must be "auto" or a list of the'),
        ("pipeline.partition=half", 'partition = "half" must be "auto" or a list of the layers'),
    ],
)
def test_a_wrong_key_or_value_is_named_with_what_is_expected(override: str, message: str) -> None:
    assert message in refused(DIGITS, override)


def test_text_is_quoted_and_is_not_drawn_at_a_temperature_near_0() -> None:
    """It would be found out after all the training: weights overflow."""
    said = refused(GPT_SMALL, "data.path=2024")
    assert 'data.path = 2024 must be a valid string; write it in quotes: data.path="2024"' in said
    for temperature in ("0", "1e-40", "0.009"):
        said = f"data.sample_temperature = {temperature} must be greater than or equal to 0.01"
        assert said in refused(GPT_SMALL, f"data.sample_temperature={temperature}")


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["pipeline.partition=[5, 3, 3]"], "pipeline.partition = [5, 3, 3] has 3 stages, "),
        (
            ["optimizer.name=sgd", "optimizer.nesterov=true", "optimizer.momentum=0"],
            "optimizer.nesterov = true needs optimizer.momentum above 0",
        ),
        (
            ["pipeline.plan=auto", "pipeline.num_microbatches=4"],
            'pipeline.plan = "auto" decides pipeline.num_stages, pipeline.partition, '
            "pipeline.schedule, pipeline.recompute; leave out one or the other",
        ),
        (["pipeline.cluster=h100"], '"h100" is what pipeline.plan = "auto" plans for'),
        (["pipeline.measure=true"], 'is how pipeline.plan = "auto" plans; set that too'),
        (["train.average_checkpoints=2"], 'with data.name = "digits" changes nothing'),
    ],
)
def test_keys_must_agree_with_each_other(overrides: list[str], message: str) -> None:
    assert message in refused(DIGITS, *overrides)


def test_a_recipe_that_plans_itself_is_written_without_what_the_plan_decides(tmp_path) -> None:
    text = GPT_SMALL.read_text().replace("num_stages = 2\nnum_microbatches = 4", "PLANNED")
    for planned, number in (('plan = "auto"', None), ('plan = "auto"\nnum_microbatches = 1', 1)):
        recipe = read_recipe(written(tmp_path, text.replace("PLANNED", planned)))
        again = read_recipe(written(tmp_path, recipe_to_toml(recipe)))
        assert again == recipe
        assert again.pipeline.planned_microbatches == number
    for key in ("num_stages = 2", "num_microbatches = 2"):
        said = refused(written(tmp_path, text.replace("PLANNED", key)))
        assert re.search(r"the key pipeline\.num_(stages|microbatches) is missing", said)


def test_all_faults_are_listed_one_a_line_with_the_file() -> None:
    lines = refused(DIGITS, "train.epochs=ten", "train.seed=-1", "foo.bar=1").splitlines()
    assert len(lines) == 3
    assert all(line.startswith(f"{DIGITS}: ") for line in lines)


def test_files_that_are_no_recipe_are_named(tmp_path: Path) -> None:
    assert f"there is no recipe {tmp_path / 'no.toml'}" in refused(tmp_path / "no.toml")
    assert f"cannot read the recipe {tmp_path}" in refused(tmp_path)
    (tmp_path / "x.toml").write_bytes(b"\xff\xfe")
    assert "cannot read the recipe" in refused(tmp_path / "x.toml")
    path = written(tmp_path, '[model]\nname = "residual"\nwidth = \n')
    assert re.search(r"is not valid TOML: .*line 3", refused(path))
    message = refused(written(tmp_path, "train = 3\n[optimizer]\nlr = 0.1\n[model]\n"))
    for fault in ("section [data]", "section [pipeline]", "key optimizer.name", "key model.name"):
        assert f"the {fault} is missing" in message
    assert "train = 3 must be a section: [train] and keys below it" in message


def test_an_override_without_section_suggests_it() -> None:
    assert "did you mean pipeline.num_stages?" in refused(DIGITS, "num_stages=3")
    for far in ("nope=3", "optimiser=3", "batch=3"):
        message = refused(DIGITS, far)
        assert "did you mean" not in message
        assert "; sections are " in message
        assert "pipeline" in message.rpartition("sections are")[2]


def test_overrides_are_toml_or_plain_words() -> None:
    recipe = read_recipe(
        DIGITS,
        ["pipeline.partition=[5, 6]", "pipeline.schedule=one_f_one_b", "optimizer.lr = 1e-3"],
    )
    assert recipe.pipeline.partition == (5, 6)
    assert recipe.pipeline.schedule == "one_f_one_b"
    assert recipe.optimizer.lr == 1e-3


def test_a_recipe_written_is_the_recipe_read(tmp_path: Path) -> None:
    recipe = read_recipe(DIGITS, ["pipeline.partition=[5, 6]"])
    text = recipe_to_toml(recipe)
    assert read_recipe(written(tmp_path, text)) == recipe
    assert "eps = 1e-08" in text  # defaults are written as well


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_can_be_written_and_read(text: str) -> None:
    recipe = read_recipe(GPT_SMALL, ["data.path=text.txt"])
    recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"prompt": text})})
    with TemporaryDirectory() as folder:
        assert read_recipe(written(Path(folder), recipe_to_toml(recipe))) == recipe


def test_what_is_no_text_is_refused() -> None:
    assert "'data.path=\\udcff': the value is no valid Unicode" in refused(
        GPT_SMALL, "data.path=\udcff"
    )


def test_a_tilde_is_the_users_home() -> None:
    recipe = read_recipe(GPT_SMALL, ["data.path=~/text.txt", "start.checkpoint=~/runs/old"])
    assert recipe.data.path == str(Path.home() / "text.txt")  # type: ignore[union-attr]
    assert recipe.start.checkpoint == str(Path.home() / "runs" / "old")


def test_a_recipe_is_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        read_recipe(DIGITS).train.epochs = 3


def test_every_key_is_described() -> None:
    def sections(kind: type[Section]) -> list[type[Section]]:
        return [kind, *(deeper for sub in kind.__subclasses__() for deeper in sections(sub))]

    for section in sections(Section):
        if section is not Recipe:
            missing = [k for k, field in section.model_fields.items() if not field.description]
            assert missing == []


def test_how_a_run_is_executed_may_change_on_resume() -> None:
    changes = [
        *("pipeline.num_stages=3", "pipeline.schedule=one_f_one_b"),
        *("pipeline.recompute=never", "pipeline.memory_limit_bytes=1000"),
        *("pipeline.offload=true", "train.keep_checkpoints=5"),
    ]
    assert all(change.partition("=")[0] in FREE_ON_RESUME for change in changes)
    check_resumable(read_recipe(DIGITS), read_recipe(DIGITS, changes))


def test_what_a_run_computes_may_not_change_on_resume() -> None:
    others = ["train.batch_size=64", "optimizer.lr=0.1", "data.max_shift=0"]
    for changes, said in (
        (["pipeline.num_microbatches=4"], "pipeline.num_microbatches was 8 and cannot become 4"),
        (["pipeline.num_microbatches=4"], "BatchNorm statistics and dropout masks belong to"),
        (others, "^data.max_shift .*\noptimizer.lr .*\ntrain.batch_size .*$"),
    ):
        with pytest.raises(RecipeError, match=said):
            check_resumable(read_recipe(DIGITS), read_recipe(DIGITS, changes))
