"""The recipe that ships with Penstock learns to read digits."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from penstock.train.command import Request, start_run
from penstock.train.interrupt import Interrupt

DIGITS = Path(__file__).parents[2] / "recipes" / "digits.toml"


@pytest.mark.slow
def test_two_stages_read_at_least_97_of_100_unseen_digits(tmp_path: Path) -> None:
    console = Console(file=io.StringIO())
    summary = start_run(Request(DIGITS, [], tmp_path / "run"), console, Interrupt())
    assert summary.finished and len(summary.stages) == 2
    assert summary.scores["test_accuracy"] >= 0.97
