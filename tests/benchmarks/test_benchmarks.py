"""Every benchmark runs at its smallest setting, prints its table and can write it down."""

import json
import subprocess
import sys
from argparse import Namespace
from dataclasses import replace
from itertools import dropwhile, takewhile
from pathlib import Path

import pytest

from benchmarks.report import BEGIN, END, PLOT, Column, Report, publish
from benchmarks.throughput.contestants import InProcess, Work, check, plain
from benchmarks.throughput.main import SMALLEST
from benchmarks.throughput.processes import Key, Part, Processes
from benchmarks.two_hosts.hosts import why_not

ROOT = Path(__file__).parents[2]
FOLDERS = sorted(path.parent for path in (ROOT / "benchmarks").glob("*/main.py"))


NO_HOSTS = why_not()
MARKS: dict[str, list[pytest.MarkDecorator]] = {
    **{folder.name: [pytest.mark.slow] for folder in FOLDERS if folder.name != "simulate"},
    "two_hosts": [
        pytest.mark.skipif(NO_HOSTS is not None, reason=NO_HOSTS or ""),
        pytest.mark.slow,
    ],
}
"""Marks of the benchmarks: one is tried among the quick tests."""


@pytest.fixture
def report() -> Report:
    columns = (Column("who", "name"), Column("ms", "ms", ".1f"))
    rows = ({"name": "plain", "ms": 12.34}, {"name": "pipeline", "ms": 7.0})
    return Report(columns, rows, {"rounds": 3}, ("A note.",))


@pytest.mark.parametrize(
    "folder",
    [pytest.param(path, id=path.name, marks=MARKS.get(path.name, [])) for path in FOLDERS],
)
def test_every_benchmark_runs_and_prints_its_table(folder: Path, tmp_path: Path) -> None:
    written = tmp_path / "figures.json"
    program = ["-W", "error", "-m", f"benchmarks.{folder.name}.main"]
    done = subprocess.run(
        [sys.executable, *program, "--smallest", "--json", str(written)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = dropwhile(lambda line: not line.startswith("|"), done.stdout.splitlines())
    table = [*takewhile(lambda line: line.startswith("|"), lines)]
    figures = json.loads(written.read_text())
    assert len(table) == 2 + len(figures["rows"])
    assert len({line.count("|") for line in table}) == 1
    assert {"hardware", "torch", "Python", "date"} <= figures["machine"].keys()
    assert "hardware: " in done.stdout
    left_out = [note for note in figures["notes"] if "left out" in note]
    assert not [note for note in left_out if "penstock" in note or "torch.dist" in note]
    assert written.with_suffix(".png").exists() == (folder / PLOT).exists()


@pytest.mark.slow
@pytest.mark.parametrize("part", ("chosen", "uneven", "together", "kinds", "gpu"))
def test_the_parts_of_foresight_run_and_print_their_tables(part: str) -> None:
    program = ["-W", "error", "-m", f"benchmarks.foresight.{part}", "--smallest"]
    done = subprocess.run(
        [sys.executable, *program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n|") > 3


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_every_benchmark_says_what_it_claims_and_holds_a_measured_table(folder: Path) -> None:
    text = (folder / "README.md").read_text()
    assert "**Claim.**" in text
    assert f"python -m benchmarks.{folder.name}.main" in text
    measured = text.partition(BEGIN)[2].partition(END)[0]
    heads, rule, *rows = [line for line in measured.splitlines() if line.startswith("| ")]
    assert heads.count("|") == rule.count("|") and rows
    assert "hardware: " in measured
    assert (folder / "requirements.txt").exists()
    assert (folder / PLOT).exists() == (f"]({PLOT})" in text)


def test_there_is_a_benchmark_for_each_claim() -> None:
    claims = {"capture", "low_resource", "memory", "overhead", "partition", "throughput"}
    claims |= {"asynchronous", "foresight", "resharding", "sharding", "split_backward"}
    claims |= {"zero_bubble"}
    questions = {"batch_size", "depth_width", "stability"}
    others = {"alpa_paper", "gpipe_paper", "iopddl", "published", "simulate"}
    others |= {"two_commits", "two_hosts"}
    assert {folder.name for folder in FOLDERS} == claims | questions | others


def test_updating_a_readme_replaces_what_stands_between_the_marks_by_figures_alone(
    report: Report, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    options = {"json": None, "update_readme": True}
    publish(replace(report, rows=()), Namespace(**options, smallest=False), tmp_path)
    publish(report, Namespace(**options, smallest=True), tmp_path)
    assert "old" in readme.read_text()
    publish(report, Namespace(**options, smallest=False), tmp_path)
    text = readme.read_text()
    assert text.startswith(f"before\n{BEGIN}\n| who")
    assert text.endswith(f"{END}\nafter\n")
    assert "old" not in text
    assert str(report) in capsys.readouterr().out


def test_a_contestant_that_computes_something_else_is_refused() -> None:
    first, twice = plain(SMALLEST, 2), SMALLEST.model()
    inputs, targets = SMALLEST.data()
    other = InProcess("other", twice, lambda: (twice(inputs) - targets).square().sum().backward())
    check([first, plain(SMALLEST, 4)])
    with pytest.raises(AssertionError, match="other computes another gradient of 0"):
        check([first, other])


def cannot_run(rank: int, work: Work, counts: tuple[int, ...]) -> dict[Key, Part]:
    """Fail as a peer does that is too old, say."""
    raise ImportError(f"process {rank} finds no such module")


@pytest.mark.slow
def test_a_peer_that_does_not_run_says_why() -> None:
    with pytest.raises(RuntimeError, match="rank 1: ImportError: process 1 finds no such module"):
        Processes(cannot_run, SMALLEST, (2,))
