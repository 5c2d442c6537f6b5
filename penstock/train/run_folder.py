"""What a run leaves behind, in one folder that is never overwritten.

recipe.toml             the recipe with every key
job                     the torchrun job that began the run, if one did
metrics.jsonl           one JSON object a line: kind "step" and kind "epoch"
checkpoints/step-000120 the newest few; a folder is there whole or not at all
timeline.json, .svg, .png, .chrome.json     one traced step
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.checkpoint.files import UNFINISHED, remove_folder
from penstock.errors import RunFolderError

RECIPE = "recipe.toml"
METRICS = "metrics.jsonl"
JOB = "job"
CHECKPOINTS = "checkpoints"
_PREFIX = "step-"

Metrics = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RunFolder:
    """A run folder that exists.

    Several processes may have it open; those with `writes` false leave it as it is.
    """

    path: Path
    writes: bool = True

    @property
    def recipe_path(self) -> Path:
        return self.path / RECIPE

    @property
    def metrics_path(self) -> Path:
        return self.path / METRICS

    def write_recipe(self, toml: str) -> None:
        """Write the recipe copy; a reader sees the old one or the new one, never a part."""
        self.write_text(RECIPE, toml)

    def write_text(self, name: str, text: str) -> None:
        """Write a file in one step."""
        if self.writes:
            replace_text(self.path / name, text)

    def append_metrics(self, metrics: Metrics) -> None:
        """Add one line to metrics.jsonl."""
        if not self.writes:
            return
        with self.metrics_path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(metrics) + "\n")

    def read_metrics(self) -> Iterator[dict[str, Any]]:
        """Yield the lines of metrics.jsonl; a last line that a crash cut short is left out."""
        if not self.metrics_path.exists():
            return
        for line in self.metrics_path.read_text(encoding="utf-8").splitlines():
            try:
                yield json.loads(line)
            except ValueError:
                return

    def drop_metrics_after(self, step: int) -> None:
        """Remove the lines of later steps, which a resumed run will write again."""
        if self.writes:
            kept = [metrics for metrics in self.read_metrics() if metrics["step"] <= step]
            lines = (json.dumps(metrics) + "\n" for metrics in kept)
            self.write_text(METRICS, "".join(lines))

    def checkpoint_path(self, step: int) -> Path:
        """Give where the checkpoint after `step` steps lies."""
        return self.path / CHECKPOINTS / f"{_PREFIX}{step:06d}"

    def checkpoints(self) -> list[Path]:
        """List the complete checkpoints, oldest first."""
        found = (self.path / CHECKPOINTS).glob(f"{_PREFIX}*")
        return sorted(found, key=lambda path: int(path.name.removeprefix(_PREFIX)))

    def keep_newest(self, count: int) -> None:
        """Delete all checkpoints but the newest `count`, and what an interrupted save left."""
        if not self.writes:
            return
        for path in self.checkpoints()[:-count]:
            remove_folder(path)
        for path in (self.path / CHECKPOINTS).glob(f".*{UNFINISHED}"):
            remove_folder(path)


def check_free(path: Path) -> None:
    """Refuse a place that is taken.

    Raises:
        RunFolderError: something is there; says how to go on instead.
    """
    if not path.exists():
        return
    if (path / RECIPE).is_file():
        raise RunFolderError(
            f"the run folder {path} exists already and is never overwritten; continue it with "
            f"--resume {path}, or choose another --run-folder"
        )
    raise RunFolderError(
        f"{path} exists already and is no run folder; choose another --run-folder"
    )


def create(path: Path, toml: str, job: str | None = None) -> RunFolder:
    """Make the run folder `path` with its copy of the recipe; `job` is what torchrun calls it.

    Raises:
        RunFolderError: `path` exists, or cannot be made.
    """
    check_free(path)
    try:
        path.mkdir(parents=True)
    except FileExistsError:
        check_free(path)
        raise
    except OSError as error:
        raise RunFolderError(f"cannot make the run folder {path}: {error.strerror}") from None
    folder = RunFolder(path)
    if job is not None:
        folder.write_text(JOB, job + "\n")
    folder.write_recipe(toml)
    return folder


def create_numbered(parent: Path, name: str, toml: str, job: str | None = None) -> RunFolder:
    """Make the first free one of parent/name-1, parent/name-2 and so on."""
    number = 1
    while (parent / f"{name}-{number}").exists():
        number += 1
    return create(parent / f"{name}-{number}", toml, job)


def begun_by(job: str | None, candidates: Iterable[Path]) -> Path | None:
    """Give the newest of the `candidates` that the torchrun job `job` began; None if none is."""
    if job is None:
        return None
    folders = [path for path in candidates if _job_of(path) == job]
    return max(folders, key=lambda path: (path / JOB).stat().st_mtime, default=None)


def _job_of(path: Path) -> str | None:
    try:
        return (path / JOB).read_text(encoding="utf-8").rstrip("\n")
    except OSError:
        return None


def open_existing(path: Path, *, writes: bool = True) -> RunFolder:
    """Open a run folder to resume from.

    Raises:
        RunFolderError: there is none at `path`.
    """
    if not (path / RECIPE).is_file():
        what = f"holds no {RECIPE}" if path.is_dir() else "does not exist"
        raise RunFolderError(
            f"cannot resume: {path} {what}; give the run folder that an earlier `penstock train` "
            "made"
        )
    return RunFolder(path, writes)


def replace_text(path: Path, text: str) -> None:
    """Write a file in one step: readers see the old text or the new one."""
    unfinished = path.with_name(f".{path.name}{UNFINISHED}")
    with unfinished.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
