"""The device of a run: the recipe's or the command's, said in the first line."""

import io
from pathlib import Path

import pytest
import torch

from penstock.cli.main import run
from penstock.errors import PenstockError
from penstock_recipes.errors import RecipeError
from penstock_recipes.recipe.read import read_recipe
from penstock_recipes.train.command import Request, resume_run, start_run
from penstock_recipes.train.interrupt import Interrupt
from tests.digits import DIGITS, TWO_EPOCHS
from tests.quiet import quiet
from tests.runs import sets

HERE = "cuda:0" if torch.cuda.is_available() else "cpu"
ONE = (*TWO_EPOCHS, "train.epochs=1", "pipeline.num_stages=1")


def test_the_first_line_of_a_run_names_its_device(tmp_path: Path) -> None:
    changes = [*ONE, "pipeline.device=auto"]
    lines = []
    for make, request in (
        (start_run, Request(DIGITS, changes, tmp_path / "run")),
        (resume_run, Request(None, ["train.epochs=2"], tmp_path / "run")),
    ):
        console = quiet()
        assert make(request, console, Interrupt()).finished
        assert isinstance(console.file, io.StringIO)
        lines.append(console.file.getvalue().splitlines()[0])
    assert lines == [f'on {HERE} (pipeline.device = "auto")'] * 2


def test_the_flag_is_the_key(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["train", str(DIGITS), *sets(*ONE), "--device", "cpu"]) == 0
    assert 'on cpu (pipeline.device = "cpu")' in capsys.readouterr().err
    kept = read_recipe(tmp_path / "runs" / "digits-1" / "recipe.toml")
    assert kept.pipeline.device == "cpu"


def test_a_device_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(PenstockError, match="cuda:99"):
        changes = [*ONE, "pipeline.device=cuda:99"]
        start_run(Request(DIGITS, changes, tmp_path / "run"), quiet(), Interrupt())
    with pytest.raises(RecipeError, match=r'pipeline\.device = "GPU 1" must be "auto", or a dev'):
        read_recipe(DIGITS, ["pipeline.device=GPU 1"])
