"""Write a folder from many processes: each writes the tensors of its own stage.

    model/*.safetensors       one shard a process that has tensors, or slices of some, for it
    optimizer/*.safetensors   likewise
    state.json                as ever, and the tensors and slices of each shard; rank 0 writes it
                              when all shards are there

A save runs in a thread of its own in every process, and over a process group of its own, so that
training may go on beside it.  The folder has a hidden name until it is complete.
"""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from penstock.errors import CheckpointError
from penstock.mesh import Mesh
from penstock.mesh.control import Control

from .complex_pairs import save_tensors
from .files import SUFFIX, digest_and_force, finish_folder, make_unfinished, refuse_existing
from .pieces import Own, header_of


class Saving:
    """A checkpoint that is being written."""

    def __init__(self, path: Path, wait: Callable[[], None]) -> None:
        self.path = path
        """The folder, once it is there."""
        self._wait: Callable[[], None] | None = wait
        self._error: Exception | None = None

    def wait(self) -> None:
        """Return when the folder is there, however long it takes.

        Raises:
            CheckpointError: it cannot be written; nothing is left of it.
            PeerError: another process failed meanwhile.
            WaitTimeout: another process does not answer within the mesh's deadline.
        """
        if self._error is not None:
            raise self._error
        if self._wait is None:
            return
        try:
            self._wait()
        except Exception as error:  # an interrupt is no outcome
            self._error = error
            raise
        self._wait = None


MODEL_FOLDER, OPTIMIZER_FOLDER = "model", "optimizer"

Tensors = Mapping[str, Tensor]
Digests = dict[str, str]
"""What a process has written, by the name in the folder."""
Refuse = Callable[[], None]
"""Raises where nothing may be written."""
Begin = Callable[[], Path]
"""Makes the unfinished folder."""
WriteOwn = Callable[[Path], Digests]
"""(unfinished folder) -> what this process has written there."""
Finish = Callable[[Path, Digests], None]
"""(unfinished folder, what all have written): completes the folder and gives it its name."""


@dataclass(frozen=True, slots=True)
class Content:
    """What this process writes, `tensors[file or folder][name]`, and facts of it: those of all
    processes, once they have told each other.

    `slices[file or folder][name]` says of which part a tensor is, where that is not all.
    """

    mesh: Mesh
    tensors: Mapping[str, Tensors]
    slices: Mapping[str, Own]
    facts: dict[str, Any]

    @property
    def places(self) -> tuple[dict[str, list[str]], dict[str, dict[str, Any]]]:
        """The tensors of each file that this process writes, and where its slices begin and how
        long they are.
        """
        files, slices = {}, {}
        for place, tensors in self.tensors.items():
            if tensors:
                name = place if self.mesh.world_size == 1 else shard_name(self.mesh.rank, place)
                files[name] = list(tensors)
                slices[name] = {n: own[:2] for n, own in self.slices[place].items()}
        return files, {name: own for name, own in slices.items() if own}


def begin_together(path: Path, content: Content) -> Saving:
    """Begin to write what all processes have as one folder.

    The tensors must not change until it is written.

    Waiting for it raises:
        CheckpointError: `path` exists, or a disk refuses; on every process alike.
        PeerError: a process failed meanwhile.
    """

    def begin() -> Path:
        unfinished = make_unfinished(path)
        for folder in content.tensors:
            (unfinished / folder).mkdir()
        return unfinished

    def finish(unfinished: Path, digests: Digests) -> None:
        finish_folder(unfinished, path, content.facts, digests)

    write = partial(_write_shards, content)
    return write_together(content.mesh, path, partial(refuse_existing, path), begin, write, finish)


def write_together(
    mesh: Mesh, path: Path, refuse: Refuse, begin: Begin, write_own: WriteOwn, finish: Finish
) -> Saving:
    """Begin to write the folder `path`: rank 0 begins it, all write, and rank 0 completes it.

    No deadline runs on what they write.
    """
    what = f"for all to write the checkpoint {path}"

    def write(world: Control) -> None:
        world.from_first(refuse, what)
        unfinished, error = world.from_first(partial(_try, world, begin), what)
        parts: list[tuple[Digests | None, str | None]] = [({}, error)]
        if error is None:
            mine = world.work(partial(_try, world, partial(write_own, unfinished)), what)
            parts = world.gather(mine, what)
        errors = list(dict.fromkeys(said for _, said in parts if said is not None))
        if not errors:
            digests = {name: digest for own, _ in parts for name, digest in (own or {}).items()}
            complete = partial(_try, world, partial(finish, unfinished, digests))
            _, error = world.from_first(complete, what)
            errors = [error] if error is not None else []
        if errors:
            if world.rank == 0 and unfinished is not None:
                shutil.rmtree(unfinished, ignore_errors=True)
            reached = " that all processes reach" if world.size > 1 else ""
            raise CheckpointError(
                f"cannot write the checkpoint {path}: {'; '.join(errors)}; nothing is left "
                f"of it. Make room, or choose another place{reached}"
            )

    return Saving(path, mesh.begin_save(write, what))


def _try(world: Control, job: Callable[[], Any]) -> tuple[Any, str | None]:
    """Return the result of a job, or what went wrong, to be told to the other processes."""
    try:
        return job(), None
    except Exception as problem:
        return None, f"rank {world.rank}: {problem}" if world.size > 1 else str(problem)


def shard_name(rank: int, folder: str) -> str:
    """Name what a process writes into a folder."""
    return f"{folder}/shard-{rank + 1:05d}{SUFFIX}"


def _write_shards(content: Content, unfinished: Path) -> Digests:
    """Write a checkpoint's shards; force them to the disk, and give the digests."""
    digests = {}
    for folder, tensors in content.tensors.items():
        if tensors:
            file = shard_name(content.mesh.rank, folder)
            save_tensors(tensors, unfinished / file, header_of(tensors, content.slices[folder]))
            digests[file] = digest_and_force(unfinished / file)
    return digests
