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
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from penstock.errors import CheckpointError
from penstock.mesh import Mesh

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
    """Begin to write the folder `path`: rank 0 begins it, all write, and rank 0 completes it."""
    background = mesh.background
    assert background is not None
    writing = _Writing(mesh, background.saving_group(), path)
    slot = background.saves.submit(partial(writing.write, begin, write_own, finish))
    return Saving(path, lambda: background.wait(slot, f"for all to write the checkpoint {path}"))


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


class _Writing:
    """One save, as one process sees it."""

    def __init__(self, mesh: Mesh, group: Any, path: Path) -> None:
        self._mesh, self._group, self._path = mesh, group, path

    def write(self, begin: Begin, write_own: WriteOwn, finish: Finish) -> None:
        unfinished = self._begin(begin)
        error: str | None = None
        digests: Digests = {}
        try:
            digests = write_own(unfinished)
        except Exception as problem:
            error = self._account(problem)
        everyone = self._gather((error, digests))
        errors = list(dict.fromkeys(said for said, _ in everyone if said is not None))
        if not errors:
            all_digests = {name: digest for _, part in everyone for name, digest in part.items()}
            errors = self._finish(partial(finish, unfinished, all_digests))
        if errors:
            if self._mesh.is_first_rank:
                shutil.rmtree(unfinished, ignore_errors=True)
            raise CheckpointError(
                f"cannot write the checkpoint {self._path}: {'; '.join(errors)}; nothing is left "
                "of it. Make room, or choose another place that all processes reach"
            )

    def _begin(self, begin: Begin) -> Path:
        """Let rank 0 make the hidden folder; give its name to all."""
        told: list[Any] = [None, None]
        if self._mesh.is_first_rank:
            try:
                told[0] = str(begin())
            except (OSError, CheckpointError) as error:
                told[1] = str(error)
        dist.broadcast_object_list(told, src=0, group=self._group)
        if told[1] is not None:
            raise CheckpointError(told[1])
        return Path(told[0])

    def _finish(self, finish: Callable[[], None]) -> list[str]:
        """Let rank 0 complete the folder; give what went wrong."""
        told: list[str | None] = [None]
        if self._mesh.is_first_rank:
            try:
                finish()
            except Exception as problem:
                told = [self._account(problem)]
        dist.broadcast_object_list(told, src=0, group=self._group)
        return [said for said in told if said is not None]

    def _account(self, problem: Exception) -> str:
        return f"rank {self._mesh.rank}: {problem}"

    def _gather(self, mine: Any) -> list[Any]:
        everyone: list[Any] = [None] * self._mesh.world_size
        dist.all_gather_object(everyone, mine, group=self._group)
        return everyone
