"""Runs beside each other: what differs in recipes and figures, and their curves."""

import json
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from penstock.trace.page.page import Figure
from penstock_recipes.commands.compare import compare
from penstock_recipes.errors import RunFolderError
from penstock_recipes.train.compare_page import compare_page, compare_runs


def made(folder: Path, *, lr: float, loss: float, finished: bool = True) -> Path:
    """Write the files of a small run."""
    folder.mkdir(parents=True)
    (folder / "recipe.toml").write_text(f"[model]\nwidth = 8\n[optimizer]\nlr = {lr}\n")
    lines = [{"kind": "step", "step": n, "loss": loss / n} for n in (1, 2)]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    summary = {"shown": {"test accuracy": "90.0%"}, "steps": 2, "finished": finished}
    summary |= {"seconds": 3.0, "samples_per_s": 100.0, "unit": "samples", "bubble": 0.25}
    summary |= {"share_of_ideal": None, "stages": [{"peak_bytes": 1024}, {"peak_bytes": None}]}
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    second = made(tmp_path / "b", lr=0.2, loss=4.0, finished=False)
    return made(tmp_path / "a", lr=0.1, loss=2.0), second


def test_only_what_differs_in_the_recipes_is_shown(runs: tuple[Path, Path]) -> None:
    recipe, figures = compare_runs(runs).tables
    assert recipe.heads == ("recipe", "a", "b")
    assert recipe.rows == (("optimizer.lr", "0.1", "0.2"),)
    shown = {name: values for name, *values in figures.rows}
    assert shown["steps"] == ["2", "2, interrupted"]
    assert shown["bubble"] == ["25.0%", "25.0%"] and "share of ideal" not in shown
    assert shown["kept for backward passes, at most"] == ["1 KiB", "1 KiB"]


def test_the_curves_of_runs_are_in_one_chart(runs: tuple[Path, Path]) -> None:
    page = compare_page(compare_runs(runs))
    assert [section.title for section in page.sections] == [
        "Figures",
        "Curves",
        "What differs in the recipes",
    ]
    (chart,) = page.sections[1].parts
    assert isinstance(chart, Figure)
    assert [(trace["name"], trace["y"]) for trace in chart.data] == [("a", [2, 1]), ("b", [4, 2])]


def test_runs_of_one_name_are_told_apart_and_equal_recipes_are_said(tmp_path: Path) -> None:
    places = [made(tmp_path / n / "run", lr=0.1, loss=1.0) for n in ("x", "y")]
    found = compare_runs(places)
    assert list(found.recipes) == [str(place) for place in places]
    assert str(found).startswith("The recipes are the same.")


def test_a_damaged_file_is_left_out_and_named(runs: tuple[Path, Path]) -> None:
    (runs[0] / "summary.json").write_text("[]")
    found = compare_runs(runs)
    assert "summary.json is damaged" in found.notes[0]
    assert ("steps", "-", "2, interrupted") in found.tables[1].rows


def test_what_is_no_run_is_refused(runs: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"absent does not exist; give a run folder"):
        compare_runs([runs[0], tmp_path / "absent"])


def test_the_command_prints_a_table_and_writes_a_page(runs: tuple[Path, Path]) -> None:
    output = runs[0].parent / "both.html"
    done = CliRunner().invoke(compare, [*map(str, runs), "--output", str(output)])
    assert done.exit_code == 0, done.output
    assert "optimizer.lr  0.1  0.2" in done.output and "<h2>Curves</h2>" in output.read_text()


def test_one_run_is_no_comparison(runs: tuple[Path, Path]) -> None:
    done = CliRunner().invoke(compare, [str(runs[0])])
    assert done.exit_code == click.UsageError.exit_code and "at least two" in done.output
