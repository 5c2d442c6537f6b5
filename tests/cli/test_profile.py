"""`penstock profile`: a table of what layers cost, from a recipe."""

import sys
from pathlib import Path

import pytest

from penstock import Profile
from penstock.cli.main import run
from tests.recipes.text_recipes import NAMES

ROOT = Path(__file__).parents[2]
DIGITS = "digits"
AMOEBANET = "digits_amoebanet"
SMALL = ["--set", "model.num_blocks=2", "--set", "model.width=4"]

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())


def test_layers_are_counted_and_measured(capsys: Captured) -> None:
    counted = ["profile", DIGITS, *SMALL, "--device", "h100", "--save", "counted.json"]
    assert run(counted) == 0
    assert "priced for h100" in capsys.readouterr().out
    assert run(["profile", DIGITS, *SMALL, "--json", "--microbatch-size", "16"]) == 0
    measured = Profile.from_json(capsys.readouterr().out)
    assert measured.measured_on == "core"
    assert measured.layers == Profile.load("counted.json").layers
    assert [size.microbatch_size for size in measured.sizes] == [16]


@pytest.mark.parametrize(
    "recipe",
    (pytest.param(AMOEBANET, marks=pytest.mark.slow), NAMES, NAMES + 'precision = "bfloat16"\n'),
)
def test_any_model_is_counted_for_any_device(recipe: str, tmp_path: Path) -> None:
    if "\n" in recipe:
        (tmp_path / "names.toml").write_text(recipe)
        recipe = "names.toml"
    sizes = ["--microbatch-size", "8", "--microbatch-size", "2"]
    assert run(["profile", recipe, "--device", "h100", *sizes, "--save", "it.json"]) == 0
    found = Profile.load("it.json")
    assert [size.microbatch_size for size in found.sizes] == [2, 8]
    assert sum(weights.optimizer_bytes for weights in found.weights) > 0
    assert all(kind.seconds is None for size in found.sizes for kind in size.kinds)


def test_a_device_may_be_described_in_a_file(tmp_path: Path, capsys: Captured) -> None:
    device = 'name = "mine"\nflops_per_s = { float32 = 1e12 }\nbytes_per_s = 1e11\n'
    (tmp_path / "mine.toml").write_text(device + "memory_bytes = 1\n")
    assert run(["profile", DIGITS, *SMALL, "--device", "mine.toml"]) == 0
    assert "priced for mine" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere.toml"], "there is no recipe nowhere.toml"),
        ([DIGITS, "--device", "abacus"], "no such file, and no device of this name"),
        ([DIGITS, "--device", "bad.toml"], "bad.toml: it lacks memory_bytes"),
        ([DIGITS, "--device", "cut.toml"], "cut.toml: it is damaged, or no TOML"),
        ([DIGITS, "--device", "h100", "--busy"], "leave out one of them"),
        ([DIGITS, "--microbatch-size", "0"], "--microbatch-size"),
        ([DIGITS, *SMALL, "--device", "h100", "--save", "no/where.json"], "cannot be written"),
    ],
)
def test_a_mistake_is_one_line(arguments, words, tmp_path, capsys) -> None:

    (tmp_path / "bad.toml").write_text('name = "x"\nflops_per_s = {}\nbytes_per_s = 1\n')
    (tmp_path / "cut.toml").write_text('name = "x')
    assert run(["profile", *arguments]) == 2
    out, err = capsys.readouterr()
    assert words in err
    assert err.count("\n") == 1
    assert not out
