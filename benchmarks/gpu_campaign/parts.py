"""The parts of the campaign, each with its share of the minutes; one runs in a process of its own.

A fault of a card ends all work of a process on it, and a step may hang.  So a part that fails or
takes too long costs no other part its figures.
"""

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.gpu_campaign import compiled, graphs, precision, processes
from benchmarks.gpu_campaign.contestants import Contest, Work
from benchmarks.gpu_campaign.measure import Row
from penstock.costs.cluster.files import device_preset, preset_of
from penstock.doctor.calibration.card import OF_A_CARD, CardSizes, compare
from penstock.doctor.calibration.figures import value_text

CALIBRATION_S = 16.0
"""Seconds for the figures of a card, as `penstock doctor --calibrate` takes."""
TINY_CARD = CardSizes(
    products=(32,),
    heads=(8,),
    lengths=(16,),
    tokens=32,
    width=16,
    copy_bytes=1 << 16,
    host_bytes=64,
)
"""Sizes for a CPU: fast, with meaningless figures."""
ROOT = Path(__file__).parents[2]
Found = dict[str, Any]


def throughput(work: Work, until: float) -> Iterator[Row]:
    """Train a GPT in plain torch, by Penstock and by its peers, in rounds; on a CPU in one."""
    contest = Contest(work)
    contest.run(until if work.device.type == "cuda" else 0.0)
    contest.measure_memory()
    yield from contest.rows()
    contest.close()


def tests(work: Work, until: float) -> Iterator[Row]:
    """Run the tests for GPUs; their child processes find all that this one can import."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["--maxfail", "5", "-m", "slow or not slow", "tests/gpu"]
    lines = output(command, until - time.monotonic()).strip().splitlines()
    yield {"name": "tests/gpu", "remark": lines[-1] if lines else ""}
    for line in lines:
        if line.startswith(("FAILED", "ERROR")):
            yield {"name": line.split()[1], "error": line}


def foresight(work: Work, until: float) -> Iterator[Row]:
    """Predict steps, and measure them."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "foresight.json"
        command = [sys.executable, "-m", "benchmarks.foresight.gpu", "--json", str(path)]
        size = [] if work.device.type == "cuda" else ["--smallest"]
        said = output([*command, *size], until - time.monotonic())
        if not path.exists():
            raise RuntimeError(f"benchmarks.foresight.gpu left no figures: {said[-2000:]}")
        yield from json.loads(path.read_text())["rows"]


def calibration(work: Work, until: float) -> Iterator[Row]:
    """Measure what the card's preset assumes; on a CPU beside an H100's, to show that it runs."""
    is_cuda, preset = work.device.type == "cuda", device_preset("h100")
    if is_cuda:
        known = torch.cuda.get_device_properties(work.device)
        of_card = preset_of(known.name, known.total_memory)
        if of_card is None:
            yield {"name": known.name, "remark": "no preset describes this card"}
            return
        preset = of_card
    budget_s = min(CALIBRATION_S, until - time.monotonic()) if is_cuda else 0.0
    sizes = OF_A_CARD if is_cuda else TINY_CARD
    found = compare(work.device, preset, budget_s, sizes)
    for own in found:
        values = {"measured": own.figure.spread.middle, "preset": own.preset}
        texts = {
            name: None if value is None else value_text(own.figure.unit, value)
            for name, value in values.items()
        }
        line = f"{own.key} = {own.value:.4g}"
        yield {"name": own.figure.name, **texts, "preset_off": own.off, "line": line}


class Part(NamedTuple):
    """The rows of a part, until a time of `time.monotonic`, and its share of the minutes."""

    rows: Callable[[Work, float], Iterator[Row]]
    share: float


PARTS = {
    "graphs": Part(graphs.rows, 0.16),
    "nccl": Part(processes.stages, 0.12),
    "throughput": Part(throughput, 0.12),
    "tests": Part(tests, 0.14),
    "buckets": Part(processes.buckets, 0.06),
    "precision": Part(precision.rows, 0.1),
    "compile": Part(compiled.rows, 0.14),
    "foresight": Part(foresight, 0.1),
    "calibration": Part(calibration, 0.06),
}
"""The parts in their order: first those that never ran on a card, then the figures of the README,
then options that make them better."""


def measure(part: str, work: Work, share_s: float, path: Path) -> None:
    """Write the rows of a part into the file, each as it comes.

    This process becomes the leader of a session, so that all that it starts can be killed with it.
    """
    os.setsid()
    rows: list[Row] = []
    is_whole = True
    until = time.monotonic() + share_s
    try:
        for row in PARTS[part].rows(work, until):
            rows.append(row)
            write(path, {part: {"rows": rows, "is_whole": False}})
    except Exception as error:  # the rows so far are worth their minutes all the same
        rows.append({"name": part, "error": f"{type(error).__name__}: {error}"})
        is_whole = False
    write(path, {part: {"rows": rows, "is_whole": is_whole}})


def write(path: Path, found: Found) -> None:
    """Put what was found into the file, beside what is there."""
    new = path.with_suffix(".new")  # whole or not there: the process may be killed meanwhile
    new.write_text(json.dumps(read(path) | found, indent=1))
    new.replace(path)


def read(path: Path) -> Found:
    """Return what is in the file, if there is one."""
    found: Found = json.loads(path.read_text()) if path.exists() else {}
    return found


def versions(device: torch.device) -> Found:
    """Say what is installed, and which card is here."""
    found: Found = {"python": platform.python_version(), "torch": torch.__version__}
    if device.type == "cuda":
        at = torch.cuda.get_device_properties(device)
        found |= {"card": at.name, "memory MiB": at.total_memory >> 20}
        found |= {"cuda": torch.version.cuda, "nccl": list(torch.cuda.nccl.version())}
        asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        found["driver"] = output(asked).strip()
    return found


def output(command: list[str], timeout_s: float | None = None) -> str:
    """Return what a command prints; it finds all modules that this process does."""
    paths = os.pathsep.join(dict.fromkeys([str(ROOT), *filter(None, sys.path)]))
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": paths},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except FileNotFoundError:
        return "not installed"
    except subprocess.TimeoutExpired as error:
        said = error.stdout or b""
        text = said.decode() if isinstance(said, bytes) else said
        return f"{text}\nended after {timeout_s:.0f} s"
    return done.stdout
