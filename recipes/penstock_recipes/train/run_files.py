"""The files of a run folder, read without torch.

recipe.toml             the recipe with every key
plan.json               the plan of the newest start
plans/001-step-000000.json  the plan of each start, with its first step
job                     torchrun's names of the job that began the run, one per host
data.digest             digest of the data
start.digest            digest of the checkpoint that the first weights came from
skipped.txt             the samples that could not be read
metrics.jsonl           one JSON object a line: kind "step" and kind "epoch"
metrics.damaged         its damaged lines, moved there on resume
checkpoints/step-000120 the newest few, and the best; a folder is complete or absent
best.json               which checkpoint is best: its epoch, step, main measure and score
environment.json        versions, machines and processes of the newest start
timeline.json, .chrome.json     one traced step
memory.json             the step whose memory was traced, as a timeline
step.json               seconds of the traced step, and of its weight update
predicted.json          the predicted timeline of a step, put there by hand
summary.json            the results of the run
report.html             the run as a page
tensorboard/            the metrics for TensorBoard, if the recipe enables them
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
BEST = "best.json"
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
    """Write a file atomically: readers see the old text or the new one.

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
    """Read the lines of a metrics file; an absent file has none.

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
