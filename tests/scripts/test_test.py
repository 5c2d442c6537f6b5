"""`scripts/test` gives pytest's exit code, and fails if a process is left."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LEAVES = """
import os, subprocess
def test_well():
    subprocess.run(["sh", "-c", "sleep 30 <&- >&- 2>&- & echo $! > pid"], check=True)
"""
FAILS = "def test_badly(): raise ValueError"


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="processes are found in /proc")
@pytest.mark.parametrize(("test", "code"), [("def test_well(): pass", 0), (FAILS, 1), ("", 5)])
def test_it_gives_the_exit_code_of_pytest(test: str, code: int, tmp_path: Path) -> None:
    assert run(test, tmp_path).returncode == code


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="processes are found in /proc")
def test_a_process_that_is_left_is_listed(tmp_path: Path) -> None:
    ended = run(LEAVES.replace("pid", str(tmp_path / "pid")), tmp_path)
    pid = (tmp_path / "pid").read_text().strip()
    os.kill(int(pid), 9)
    assert ended.returncode == 1, ended.stdout
    assert "1 passed" in ended.stdout
    assert f"  {pid}  sleep 30" in ended.stdout


def run(test: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    (folder / "test_one.py").write_text(test)
    quiet = ("-q", "-p", "no:cacheprovider", "-c", os.devnull)
    return subprocess.run(
        [ROOT / "scripts" / "test", *quiet, folder], capture_output=True, text=True, check=False
    )
