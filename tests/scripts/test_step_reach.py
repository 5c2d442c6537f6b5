"""What a reader has to read of a step and of a plan does not grow unseen."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MOST = {"step": (21, 5_079), "plan": (65, 10_340)}
"""Files and lines at most."""


@pytest.mark.parametrize("call", MOST)
def test_what_a_call_enters_does_not_grow(call: str) -> None:
    """In a process of its own: what is remembered from other calls is not entered again."""
    command = [sys.executable, "-W", "error", "-m", "scripts.step_reach", call]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    files, _, lines, *_ = done.stdout.splitlines()[-1].replace(",", "").split()
    most_files, most_lines = MOST[call]
    assert int(files) <= most_files, done.stdout
    assert int(lines) <= most_lines, done.stdout
