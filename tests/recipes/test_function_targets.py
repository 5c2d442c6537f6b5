"""Commands that take a recipe take package.module:function, too."""

import json
from pathlib import Path

import pytest

from penstock.cli.main import run
from tests.digits import DIGITS, SMALL
from tests.runs import sets

MODEL = """
import torch
from torch import nn


def example():
    return nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)]), torch.randn(16, 8)
"""
Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _beside_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("of_functions.py").write_text(MODEL)


def test_profile_takes_a_function(capsys: Captured) -> None:
    assert run(["profile", "of_functions:example", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["layers"]) == 6


def test_plan_takes_a_function(capsys: Captured) -> None:
    assert run(["plan", "of_functions:example", "--cluster", "h100", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["layers"]) == 6


def test_simulate_takes_a_function_and_measures_its_layers(capsys: Captured) -> None:
    assert run(["simulate", "of_functions:example"]) == 0
    drawn = capsys.readouterr().out
    assert drawn.count("rank ") == 2 and "F3" in drawn and "F4" not in drawn  # as check has it
    assert "step " in drawn and " ms" in drawn
    given = ["--num-stages", "3", "--num-microbatches", "2", "--schedule", "gpipe", "--recompute"]
    assert run(["simulate", "of_functions:example", *given]) == 0
    drawn = capsys.readouterr().out
    assert drawn.count("rank ") == 3 and "F2" not in drawn and "R recompute" in drawn


def test_simulate_takes_a_recipe_as_its_keys_say(capsys: Captured) -> None:
    changes = sets(*SMALL, "pipeline.partition=[1, 3, 4]", "pipeline.num_stages=3")
    assert run(["simulate", str(DIGITS), *changes]) == 0
    drawn = capsys.readouterr().out
    assert drawn.count("rank ") == 3
    assert "F7" in drawn and "F8" not in drawn


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["of_functions:none"], "of_functions has no function 'none'; it defines: example"),
        (["of_functions:example", "--forward", "2"], "say that; leave out --forward"),
        (["of_functions:example", "--num-stages", "7"], "has 6 layers; choose at most 6 stages"),
        (["of_functions:example", "--set", "a.b=1"], "changes a recipe, and of_functions:example"),
        (["--set", "a.b=1"], "--set a.b=1 changes a recipe; give one as TARGET"),
    ],
)
def test_what_cannot_be_simulated_is_refused(words, said, capsys: Captured) -> None:
    assert run(["simulate", *words]) == 2
    assert said in capsys.readouterr().err
