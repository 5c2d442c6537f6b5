"""What a run leaves behind, in one folder that is never overwritten; run_files.py lists it."""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from penstock.checkpoint import remove_checkpoint, remove_unfinished
from penstock_recipes.errors import RunFolderError

from .run_files import (
    CHECKPOINTS,
    DAMAGED_METRICS,
    JOB,
    LOCK,
    METRICS,
    PLAN,
    PLANS,
    RECIPE,
    metrics_lines,
    metrics_of,
    replace_text,
)

_PREFIX = "step-"
_CHECKPOINT = re.compile(rf"{_PREFIX}(\d+)")

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

    def lock(self) -> FileLock | None:
        """Keep other jobs out until it is released; None where files cannot be locked.

        Raises:
            RunFolderError: another job trains here.
        """
        lock = FileLock(self.path / LOCK, timeout=0)
        try:
            lock.acquire()
        except Timeout:
            raise RunFolderError(
                f"another job trains in {self.path}; let it end, or stop it, before you go on here"
            ) from None
        except (OSError, NotImplementedError):
            return None
        return lock

    def write_text(self, name: str, text: str) -> None:
        """Write a file in one step: a reader sees the old one or the new one, never a part."""
        if self.writes:
            replace_text(self.path / name, text)

    def keep_plan(self, text: str, step: int) -> None:
        """Write the plan by which the model is run from a step on; those of other starts stay."""
        if not self.writes:
            return
        self.write_text(PLAN, text)
        (self.path / PLANS).mkdir(exist_ok=True)
        number = 1 + len(list((self.path / PLANS).glob("*.json")))
        self.write_text(f"{PLANS}/{number:03}-{_PREFIX}{step:06d}.json", text)

    def append_metrics(self, metrics: Metrics) -> None:
        """Add one line to metrics.jsonl; a number that is none, as JSON has it, is null."""
        if self.writes:
            _append(self.metrics_path, json.dumps(_finite(metrics)).encode() + b"\n")

    def read_metrics(self) -> Iterator[dict[str, Any]]:
        """Yield the lines of metrics.jsonl; those that are damaged are left out."""
        for line in metrics_lines(self.metrics_path):
            metrics = metrics_of(line)
            if metrics is not None:
                yield metrics

    def drop_metrics_after(self, step: int) -> int:
        """Remove the lines of later steps, which a resumed run will write again.

        Damaged lines go to metrics.damaged, but for a last one that a crash cut short.

        Returns:
            How many were damaged.
        """
        if not self.writes:
            return 0
        lines = metrics_lines(self.metrics_path)
        read = [(line, metrics_of(line)) for line in lines]
        damaged = [line for line, metrics in read[:-1] if metrics is None and line.strip()]
        if damaged:
            _append(self.path / DAMAGED_METRICS, b"".join(line + b"\n" for line in damaged))
        kept = (line for line, metrics in read if metrics is not None and metrics["step"] <= step)
        self.write_text(METRICS, "".join(line.decode() + "\n" for line in kept))
        return len(damaged)

    def checkpoint_path(self, step: int) -> Path:
        """Return where the checkpoint after `step` steps lies."""
        return self.path / CHECKPOINTS / f"{_PREFIX}{step:06d}"

    def checkpoints(self) -> list[Path]:
        """List the complete checkpoints, oldest first."""
        found = {
            int(match[1]): path
            for path in (self.path / CHECKPOINTS).glob(f"{_PREFIX}*")
            if (match := _CHECKPOINT.fullmatch(path.name)) is not None
        }
        return [found[step] for step in sorted(found)]

    def set_aside(self, checkpoint: Path) -> None:
        """Rename a checkpoint that cannot be read, so that it is not found again."""
        if self.writes:
            checkpoint.rename(checkpoint.with_name(f"damaged-{checkpoint.name}"))

    def due(self, every: int) -> list[Path]:
        """List the complete checkpoints that are of every so many steps, and the newest one.

        Others were saved where the run was interrupted.
        """
        found = self.checkpoints()
        return [path for path in found if _step(path) % every == 0 or path == found[-1]]

    def keep_newest(self, number: int, every: int) -> None:
        """Delete all checkpoints but the newest `number` of those that were due, and what an
        interrupted save left.
        """
        if not self.writes:
            return
        kept = self.due(every)[-number:]
        for path in self.checkpoints():
            if path not in kept:
                remove_checkpoint(path)
        self.remove_unfinished()

    def add_lines(self, name: str, lines: Iterable[str]) -> int:
        """Add lines to a file, but for those that it has; give how many it has then."""
        path = self.path / name
        before = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        every = list(dict.fromkeys([*before, *lines]))
        if len(every) > len(before):
            self.write_text(name, "\n".join(every) + "\n")
        return len(every)

    def remove_unfinished(self) -> None:
        """Delete what interrupted saves left; call when none is under way."""
        if self.writes:
            remove_unfinished(self.path / CHECKPOINTS)


def _finite(metrics: Metrics) -> Metrics:
    is_none = {key for key, v in metrics.items() if isinstance(v, float) and not math.isfinite(v)}
    return {key: None if key in is_none else value for key, value in metrics.items()}


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix(_PREFIX))


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


def create(path: Path, toml: str, jobs: Iterable[str] = ()) -> RunFolder:
    """Make the run folder `path` with its copy of the recipe; `jobs` is what torchrun calls it.

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
    if names := list(dict.fromkeys(jobs)):
        folder.write_text(JOB, "\n".join(names) + "\n")
    folder.write_text(RECIPE, toml)
    return folder


def create_numbered(parent: Path, name: str, toml: str, jobs: Iterable[str] = ()) -> RunFolder:
    """Make the first free one of parent/name-1, parent/name-2 and so on."""
    for path in (parent / f"{name}-{number}" for number in count(1)):
        if path.exists():
            continue
        try:
            return create(path, toml, jobs)
        except RunFolderError:
            if not path.exists():
                raise  # else another job was faster
    raise AssertionError  # there is always a next number


def numbered(parent: Path, name: str) -> list[Path]:
    """List what `create_numbered` has made."""
    pattern = re.compile(rf"{re.escape(name)}-\d+")
    return [path for path in parent.glob("*") if pattern.fullmatch(path.name) is not None]


def begun_by(job: str | None, candidates: Iterable[Path]) -> Path | None:
    """Return the newest of the `candidates` that the torchrun job `job` began; None if none is."""
    if job is None:
        return None
    folders = [path for path in candidates if (path / RECIPE).is_file() and job in _jobs_of(path)]
    return max(folders, key=lambda path: (path / JOB).stat().st_mtime, default=None)


def _jobs_of(path: Path) -> list[str]:
    try:
        return (path / JOB).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


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


def _append(path: Path, content: bytes) -> None:
    try:
        with path.open("ab") as file:
            file.write(content)
    except OSError as error:
        raise RunFolderError(f"cannot write {path}: {error.strerror}") from error
