"""The folder of a run, which is never overwritten; run_files.py lists its files."""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import count
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from penstock.checkpoint import remove_checkpoint, remove_unfinished
from penstock_recipes.errors import RunFolderError

from .run_files import (
    BEST,
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
_CHECKPOINT = re.compile(rf"{_PREFIX}\d+")

Metrics = Mapping[str, Any]


class Which(Enum):
    """The checkpoint of a run that is wanted."""

    BEST = "best"
    NEWEST = "newest"


@dataclass(frozen=True, slots=True)
class RunFolder:
    """A run folder that exists.

    Several processes may have it open; one with `writes` false changes nothing.
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
        """Lock the folder against other jobs; None if the disk does not support locks.

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
        """Write a file atomically: a reader sees the old text or the new one."""
        if self.writes:
            replace_text(self.path / name, text)

    def keep_plan(self, text: str, step: int) -> None:
        """Write the plan of the run from `step` on; the plans of earlier starts stay."""
        if not self.writes:
            return
        self.write_text(PLAN, text)
        (self.path / PLANS).mkdir(exist_ok=True)
        number = 1 + len(list((self.path / PLANS).glob("*.json")))
        self.write_text(f"{PLANS}/{number:03}-{_PREFIX}{step:06d}.json", text)

    def append_metrics(self, metrics: Metrics) -> None:
        """Append one line to metrics.jsonl; a non-finite number becomes null."""
        if self.writes:
            _append(self.metrics_path, json.dumps(_finite(metrics)).encode() + b"\n")

    def read_metrics(self) -> Iterator[dict[str, Any]]:
        """Yield the lines of metrics.jsonl; skip damaged ones."""
        for line in metrics_lines(self.metrics_path):
            metrics = metrics_of(line)
            if metrics is not None:
                yield metrics

    def drop_metrics_after(self, step: int) -> int:
        """Remove the lines of later steps, which a resumed run will write again.

        Damaged lines go to metrics.damaged, except a last one that a crash truncated.

        Returns:
            The number of damaged lines.
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
        """Return the path of the checkpoint after `step` steps."""
        return self.path / CHECKPOINTS / f"{_PREFIX}{step:06d}"

    def checkpoints(self) -> list[Path]:
        """List the complete checkpoints, oldest first."""
        paths = (self.path / CHECKPOINTS).glob(f"{_PREFIX}*")
        return sorted((path for path in paths if _CHECKPOINT.fullmatch(path.name)), key=_step)

    def set_aside(self, checkpoint: Path) -> None:
        """Rename a damaged checkpoint, so that it is not read again."""
        if self.writes:
            checkpoint.rename(checkpoint.with_name(f"damaged-{checkpoint.name}"))

    def due(self, every: int) -> list[Path]:
        """List the complete checkpoints of every `every` steps, and the newest one.

        The others were saved when the run was interrupted.
        """
        paths = self.checkpoints()
        return [path for path in paths if _step(path) % every == 0 or path == paths[-1]]

    def best(self) -> Path | None:
        """Return the best checkpoint; None if there is none yet, or it is gone."""
        try:
            facts = json.loads((self.path / BEST).read_text(encoding="utf-8"))
            checkpoint = self.checkpoint_path(facts["step"])
        except (OSError, ValueError, TypeError, KeyError):
            return None
        return checkpoint if checkpoint.is_dir() else None

    def chosen(self, which: Which) -> Path:
        """Return the best or the newest checkpoint; without a best one, the newest.

        Raises:
            RunFolderError: there is no checkpoint.
        """
        checkpoints = self.checkpoints()
        if not checkpoints:
            raise RunFolderError(f"{self.path} has no checkpoint yet; let that run go on")
        best = self.best() if which is Which.BEST else None
        return best or checkpoints[-1]

    def keep_newest(self, number: int, every: int, best: int | None = None) -> None:
        """Delete all checkpoints except the newest `number` that were due, and unfinished ones.

        That of step `best` is kept beside them.
        """
        if not self.writes:
            return
        newest = self.due(every)[-number:]
        for path in self.checkpoints():
            if path not in newest and _step(path) != best:
                remove_checkpoint(path)
        self.remove_unfinished()

    def add_lines(self, name: str, lines: Iterable[str]) -> int:
        """Add the lines that a file does not have yet; return its number of lines."""
        path = self.path / name
        before = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        after = list(dict.fromkeys([*before, *lines]))
        if len(after) > len(before):
            self.write_text(name, "\n".join(after) + "\n")
        return len(after)

    def remove_unfinished(self) -> None:
        """Delete the files of interrupted saves; call it only while no save runs."""
        if self.writes:
            remove_unfinished(self.path / CHECKPOINTS)


def _finite(metrics: Metrics) -> Metrics:
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in metrics.items()
    }


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix(_PREFIX))


def check_free(path: Path) -> None:
    """Refuse a path that exists.

    Raises:
        RunFolderError: it exists; the message says how to continue instead.
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
    """Create the run folder `path` with its copy of the recipe and the names of its job.

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
    """Create the first free folder of parent/name-1, parent/name-2 and so on."""
    for path in (parent / f"{name}-{number}" for number in count(1)):
        if path.exists():
            continue
        try:
            return create(path, toml, jobs)
        except RunFolderError:
            if not path.exists():
                raise  # otherwise another job was faster
    raise AssertionError  # there is always a next number


def numbered(parent: Path, name: str) -> list[Path]:
    """List the folders that `create_numbered` has made."""
    pattern = re.compile(rf"{re.escape(name)}-\d+")
    return [path for path in parent.glob("*") if pattern.fullmatch(path.name) is not None]


def begun_by(job: str | None, candidates: Iterable[Path]) -> Path | None:
    """Return the newest of the `candidates` that the torchrun job `job` began; None if none is."""
    if job is None:
        return None

    def is_of_job(path: Path) -> bool:
        try:
            return job in (path / JOB).read_text(encoding="utf-8").splitlines()
        except OSError:
            return False

    folders = [path for path in candidates if (path / RECIPE).is_file() and is_of_job(path)]
    return max(folders, key=lambda path: (path / JOB).stat().st_mtime, default=None)


def open_existing(path: Path, *, writes: bool = True, to: str = "resume") -> RunFolder:
    """Open a run folder, to resume the run or `to` do something else with it.

    Raises:
        RunFolderError: there is none at `path`.
    """
    if not (path / RECIPE).is_file():
        what = f"holds no {RECIPE}" if path.is_dir() else "does not exist"
        raise RunFolderError(
            f"cannot {to}: {path} {what}; give the run folder that an earlier `penstock train` "
            "made"
        )
    return RunFolder(path, writes)


def _append(path: Path, content: bytes) -> None:
    try:
        with path.open("ab") as file:
            file.write(content)
    except OSError as error:
        raise RunFolderError(f"cannot write {path}: {error.strerror}") from error
