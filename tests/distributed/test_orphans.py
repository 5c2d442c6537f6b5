"""Whatever ends the launcher of a job ends its processes, in every phase."""

import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launch import ROOT, left_behind
from tests.distributed.test_train_processes import TRAIN, words
from tests.distributed.warm import origin

LAUNCHER = """
import os, subprocess, sys
own = dict(word.split("=") for word in sys.argv[2:])
command, environment = [sys.executable, "-c", sys.argv[1]], {**os.environ, **own}
subprocess.Popen(command, env=environment, start_new_session=True).wait()
"""
"""As torchrun does."""
WRAPPER = """
import os, shlex, sys
python = shlex.join([sys.executable, "-c", sys.argv[1]])
own = dict(word.split("=") for word in sys.argv[2:])
os.execvpe("sh", ["sh", "-c", f"setsid {python}; exit"], {**os.environ, **own})
"""
"""It is no Python any more, and has a session made; torchrun started it."""
MEET = """
import penstock
from penstock.mesh import init
join = init.join  # importing torch takes longer than a kill
init.join = lambda *told: (print("meets", flush=True), join(*told))
penstock.init_mesh()
print("met", flush=True)
"""
BEGIN_LATE = """
import sys
print("waits", flush=True)
sys.stdin.read()
"""
"""What a script may do before it comes to the mesh, for as long as the launcher lives."""
START_A_JOB = """
import sys
from tests.distributed.launch import start
start(2, ["-m", "timeit", "-n", "1", "import time; time.sleep(1000.0)"])
print("started", flush=True)
sys.stdin.read()
"""
"""What a run of the tests does."""
WITHOUT_SIGNAL = """
import sys
sys.platform = "one that sends no signal when a parent ends"
"""
BY_TORCHRUN = ("TORCHELASTIC_ERROR_FILE=orphans",)


def launched(
    script: str, mark: str, port: str, told: Sequence[str], launcher: str = LAUNCHER
) -> "subprocess.Popen[str]":
    """Start a launcher of one process, of two; the script says a word when it is there."""
    options: dict[str, Any] = {"env": _place(0, mark, port), "stdin": subprocess.PIPE}
    options |= {"stdout": subprocess.PIPE, "text": True, "cwd": ROOT}
    return subprocess.Popen([sys.executable, "-c", launcher, script, *told], **options)


def _place(rank: int, mark: str, port: str) -> dict[str, str]:
    own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    there = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "PENSTOCK_TEST": mark}
    return {**os.environ, "PYTHONPATH": str(ROOT), **own, **there}


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="processes are found in /proc")
@pytest.mark.parametrize(
    ("late", "before"),
    [
        ("", WITHOUT_SIGNAL),
        (BEGIN_LATE, ""),
        pytest.param("", "", marks=pytest.mark.slow),
        pytest.param(BEGIN_LATE, WITHOUT_SIGNAL, marks=pytest.mark.slow),
    ],
    ids=["meeting-look", "before-it-signal", "meeting-signal", "before-it-look"],
)
def test_a_process_ends_when_its_launcher_is_killed_while_it_waits_for_the_others(
    late: str, before: str, port: str
) -> None:
    mark = uuid.uuid4().hex
    launcher = launched(late + before + MEET, mark, port, BY_TORCHRUN)
    with launcher:
        assert launcher.stdout is not None and launcher.stdin is not None
        try:
            assert launcher.stdout.readline() in ("meets\n", "waits\n")
        finally:  # whoever never says it is not waited for
            launcher.kill()
            launcher.wait()
            launcher.stdin.close()
            left = left_behind(mark)
    assert not left, left


@pytest.mark.slow
@pytest.mark.parametrize(
    ("told", "launcher"),
    [((), LAUNCHER), (BY_TORCHRUN, WRAPPER)],
    ids=["by-hand", "by-a-wrapper"],
)
def test_a_process_stays_that_its_parent_need_not_outlive(told, launcher, port) -> None:
    """By hand: when its shell goes; below a wrapper of torchrun: whatever that is."""
    mark = uuid.uuid4().hex
    with launched(MEET, mark, port, told, launcher) as parent:
        assert parent.stdout is not None and parent.stdout.readline() == "meets\n"
        if not told:
            parent.kill()
            parent.wait()
        other = [sys.executable, "-c", MEET]
        subprocess.run(other, env=_place(1, mark, port), cwd=ROOT, timeout=60, check=True)
        assert parent.stdout.readline() == "met\n"
    left = left_behind(mark)
    assert not left, left


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="processes are found in /proc")
def test_what_a_test_has_started_ends_when_the_run_of_the_tests_is_killed() -> None:
    mark = uuid.uuid4().hex
    with subprocess.Popen(
        [sys.executable, "-c", START_A_JOB],
        env={**os.environ, "PYTHONPATH": str(ROOT), "PENSTOCK_TEST": mark},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        start_new_session=True,
    ) as tests:
        assert tests.stdout is not None and tests.stdout.readline() == "started\n"
        os.killpg(tests.pid, signal.SIGTERM)
        tests.wait()
        left = left_behind(mark)
    assert not left, left


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="processes are found in /proc")
def test_no_process_is_left_whenever_the_launcher_is_killed(tmp_path: Path) -> None:
    """The first job runs to its end, to see how long a life is."""
    moments, began = random.Random(0), time.monotonic()
    assert _live(tmp_path / "whole", uuid.uuid4().hex, 200.0) == 0
    life_s = time.monotonic() - began
    for case in range(30):
        mark, moment_s = uuid.uuid4().hex, moments.uniform(0.0, life_s)
        _live(tmp_path / str(case), mark, moment_s)
        left = left_behind(mark)
        assert not left, (case, moment_s, life_s, left)


def _live(folder: Path, mark: str, moment_s: float) -> int:
    """Run a job, kill its launcher at a moment unless it has ended; give how it ended.

    The launcher has imported torch already: until then it has nothing to leave behind.
    """
    job = [*TRAIN, *words("train.checkpoint_every=4"), "--run-folder", str(folder)]
    own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PENSTOCK_TEST": mark}
    launcher = origin(0).start([*job, "--num-processes", "2"], {**os.environ, **own})
    with suppress(subprocess.TimeoutExpired):
        return launcher.wait(moment_s)
    launcher.kill()
    return launcher.wait(10.0)
