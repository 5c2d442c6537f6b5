"""The files of a run folder, read without torch.

recipe.toml             the recipe with every key
plan.json               the plan by which the model was run last
plans/001-step-000000.json  that of each start, with the step it went on from
job                     what torchrun calls the job that began the run, on each of its hosts
data.digest             tells the data from others
start.digest            tells the checkpoint whose weights the run began with from others
skipped.txt             what could not be read of the data
metrics.jsonl           one JSON object a line: kind "step" and kind "epoch"
metrics.damaged         lines of it that could not be read when the run was resumed
checkpoints/step-000120 the newest few; a folder is there whole or not at all
environment.json        with what the run was made last: versions, machines, processes
timeline.json, .chrome.json     one traced step
memory.json             the step whose memory was traced, as a timeline
step.json               seconds of the traced step, and of what lies outside of its timeline
predicted.json          what was predicted of a step, as a timeline; put there by hand
summary.json            what the run came to
report.html             all that as a page
tensorboard/            the metrics for TensorBoard, if the recipe wants them
.lock                   held while a job trains here; the system frees it when the process ends
"""

import json
import os
from pathlib import Path
from typing import Any

from penstock_recipes.errors import RunFolderError

RECIPE = "recipe.toml"
PLAN = "plan.json"
PLANS = "plans"
METRICS = "metrics.jsonl"
DAMAGED_METRICS = "metrics.damaged"
LOCK = ".lock"
JOB = "job"
START = "start.digest"
CHECKPOINTS = "checkpoints"
SKIPPED = "skipped.txt"
ENVIRONMENT = "environment.json"
TIMELINE = "timeline.json"
MEMORY = "memory.json"
STEP = "step.json"
PREDICTED = "predicted.json"
SUMMARY = "summary.json"
REPORT = "report.html"
TENSORBOARD = "tensorboard"


def replace_text(path: Path, text: str) -> None:
    """Write a file in one step: readers see the old text or the new one.

    Raises:
        RunFolderError: it cannot be written.
    """
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        with unfinished.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except OSError as error:
        raise RunFolderError(f"cannot write {path}: {error.strerror}") from error


def metrics_lines(path: Path) -> list[bytes]:
    """Read the lines of a file of metrics; none if there is no file.

    Raises:
        RunFolderError: it cannot be read.
    """
    try:
        return path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RunFolderError(f"cannot read {path}: {error.strerror}") from error


def metrics_of(line: bytes) -> dict[str, Any] | None:
    """Read a line of metrics.jsonl; None if it is damaged."""
    try:
        metrics = json.loads(line.decode())
    except (ValueError, RecursionError):
        return None
    is_good = isinstance(metrics, dict) and isinstance(metrics.get("step"), int)
    return metrics if is_good else None
