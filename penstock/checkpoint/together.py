"""Write a folder from many processes: each writes the tensors of its own stage.

    model/*.safetensors       one shard a process that has tensors for it
    optimizer/*.safetensors   likewise
    state.json                as ever, and the tensors of each shard; rank 0 writes it when all
                              shards are there

A save runs in a thread of its own in every process, and over a process group of its own, so that
training may go on beside it.  The folder has a hidden name until it is complete.
"""

import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from penstock.errors import CheckpointError, PenstockError
from penstock.mesh import Mesh
from penstock.mesh.collectives import Collectives

from .files import SUFFIX, digest_and_force, finish_folder, make_unfinished, refuse_existing
from .saving import Saving

MODEL_FOLDER, OPTIMIZER_FOLDER = "model", "optimizer"

Tensors = Mapping[str, Tensor]
Digests = dict[str, str]
"""What a process has written, by the name in the folder."""
Begin = Callable[[], Path]
"""Makes the unfinished folder, or raises where nothing may be written."""
WriteOwn = Callable[[Path], Digests]
"""(unfinished folder) -> what this process has written there."""
Finish = Callable[[Path, Digests], None]
"""(unfinished folder, what all have written): completes the folder and gives it its name."""


def begin_together(
    mesh: Mesh, path: Path, tensors: Mapping[str, Tensors], facts: Mapping[str, Any]
) -> Saving:
    """Begin to write `tensors[folder][name]` of all processes, and rank 0's `facts`, as one
    folder.  The tensors must not change until it is written.

    Waiting for it raises:
        CheckpointError: `path` exists, or a disk refuses; on every process alike.
        PeerError: a process failed meanwhile.
    """

    def begin() -> Path:
        refuse_existing(path)
        unfinished = make_unfinished(path)
        for folder in tensors:
            (unfinished / folder).mkdir()
        return unfinished

    def finish(unfinished: Path, digests: Digests) -> None:
        finish_folder(unfinished, path, facts, digests)

    return write_together(mesh, path, begin, partial(_write_shards, mesh.rank, tensors), finish)


def write_together(
    mesh: Mesh, path: Path, begin: Begin, write_own: WriteOwn, finish: Finish
) -> Saving:
    """Begin to write the folder `path`: rank 0 begins it, all write, and rank 0 completes it.

    No deadline runs on what they write.
    """
    background = mesh.background
    assert background is not None
    collectives = Collectives(
        background,
        background.saves_controls,
        background.saves_long,
        background.saving_group(),
        blames=False,
    )
    what = f"for all to write the checkpoint {path}"
    writing = _Writing(collectives, mesh.rank, path, what)
    slot = background.saves.submit(partial(writing.write, begin, write_own, finish))
    return Saving(path, lambda: background.wait_for_save(slot, what))


def shard_names(rank: int, names: Mapping[str, Iterable[str]]) -> dict[str, list[str]]:
    """Name the shards of a process by the folders they are for, with the tensors of each."""
    return {f"{f}/shard-{rank + 1:05d}{SUFFIX}": list(own) for f, own in names.items() if own}


def _write_shards(rank: int, tensors: Mapping[str, Tensors], unfinished: Path) -> Digests:
    """Write a checkpoint's shards; force them to the disk, and give the digests."""
    digests = {}
    for file in shard_names(rank, tensors):
        save_file(dict(tensors[file.partition("/")[0]]), unfinished / file)
        digests[file] = digest_and_force(unfinished / file)
    return digests


@dataclass(frozen=True, slots=True)
class _Writing:
    """One save, as one process sees it."""

    collectives: Collectives
    rank: int
    path: Path
    what: str

    def write(self, begin: Begin, write_own: WriteOwn, finish: Finish) -> None:
        unfinished: Path = self.collectives.from_first(partial(_begin, begin), self.what)
        mine = self.collectives.work(partial(self._try, partial(write_own, unfinished)), self.what)
        everyone = self.collectives.gather(mine, self.what)
        errors = list(dict.fromkeys(said for said, _ in everyone if said is not None))
        if not errors:
            digests = {name: digest for _, part in everyone for name, digest in part.items()}
            complete = partial(self._try, partial(finish, unfinished, digests))
            error, _ = self.collectives.from_first(complete, self.what)
            errors = [error] if error is not None else []
        if errors:
            if self.rank == 0:
                shutil.rmtree(unfinished, ignore_errors=True)
            raise CheckpointError(
                f"cannot write the checkpoint {self.path}: {'; '.join(errors)}; nothing is left "
                "of it. Make room, or choose another place that all processes reach"
            )

    def _try(self, job: Callable[[], Any]) -> tuple[str | None, Any]:
        """Return what went wrong in a job, to be told to the other processes, or its result."""
        try:
            return None, job()
        except Exception as problem:
            return f"rank {self.rank}: {problem}", None


def _begin(begin: Begin) -> Path:
    try:
        return begin()
    except PenstockError:
        raise
    except Exception as error:  # on rank 0; all are to hear of it
        raise CheckpointError(f"{type(error).__name__}: {error}") from error
