"""`penstock scale`: a row for each number of devices, with the plan of `penstock plan`."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.cli.main import run
from penstock.planner.plan import Plan
from tests.few_devices import cluster as few_devices
from tests.recipes.text_recipes import TEXT

Captured = pytest.CaptureFixture[str]
COMMAND = (
    *("scale", "gpt.toml", "--cluster", "here.toml"),
    *("--num-microbatches", "2", "--sharding", "zero1"),
)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a folder of its own, with a recipe whose text is not there."""
    monkeypatch.chdir(tmp_path)
    Path("gpt.toml").write_text(TEXT.replace("PATH", "none.txt"))
    few_devices(2, torch_type="cuda").save("here.toml")


def test_a_count_has_the_plan_of_penstock_plan(capsys: Captured) -> None:
    assert run((*COMMAND, "--devices", "1,...,4", "--json", "--html", "scale.html")) == 0
    entries = json.loads(capsys.readouterr().out)
    assert [entry["devices"] for entry in entries] == [1, 2, 4]
    page = Path("scale.html").read_text()
    assert "device-hours of 1,000 steps" in page and "ideal: 1 devices" not in page
    same = ("plan", *COMMAND[1:], "--json", "--microbatch-size", "1", "--microbatch-size", "16")
    assert run(same) == 0
    alone = Plan.from_json(capsys.readouterr().out)
    plan = Plan.from_json(json.dumps(entries[1]["plan"]))
    assert replace(plan, why=()) == replace(alone, why=())


@pytest.mark.parametrize(
    ("devices", "words"),
    (
        ("2,...,12", "2 doubled is never 12"),
        ("two", "give numbers such as 8,16,32"),
        ("...,8", "give numbers such as 8,16,32"),
        ("2,3", "3 devices are no whole hosts of few"),
    ),
)
def test_numbers_that_cannot_be_are_one_line(devices: str, words: str, capsys: Captured) -> None:
    assert run((*COMMAND, "--devices", devices)) == 2
    said = capsys.readouterr().err
    assert words in said and "Traceback" not in said
