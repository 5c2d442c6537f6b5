"""Save from many processes: each writes the tensors of its own stage.

    model/*.safetensors       one shard a process, by torch.distributed.checkpoint
    optimizer/*.safetensors   likewise
    state.json                as ever; rank 0 writes it when all shards are there

A save runs in a thread of its own in every process, and over a process group of its own, so that
training may go on beside it.  The folder has a hidden name until it is complete.
"""

import shutil
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_saver import save

from penstock.errors import CheckpointError
from penstock.mesh import Mesh

from .files import UNFINISHED, digest_and_force, finish_folder, refuse_existing
from .saving import Saving

MODEL_FOLDER, OPTIMIZER_FOLDER = "model", "optimizer"

Tensors = Mapping[str, Tensor]


def begin_together(
    mesh: Mesh, path: Path, tensors: Mapping[str, Tensors], facts: Mapping[str, Any]
) -> Saving:
    """Begin to write `tensors[folder][name]` of all processes, and rank 0's `facts`, as one
    folder.  The tensors must not change until it is written.

    Waiting for it raises:
        CheckpointError: `path` exists, or a disk refuses; on every process alike.
        PeerError: a process failed meanwhile.
    """
    background = mesh.background
    assert background is not None
    group = background.saving_group()
    slot = background.saves.submit(partial(_Writing(mesh, group, path).write, tensors, facts))
    return Saving(path, lambda: background.wait(slot, f"for all to write the checkpoint {path}"))


class _Writing:
    """One save, as one process sees it."""

    def __init__(self, mesh: Mesh, group: Any, path: Path) -> None:
        self._mesh, self._group, self._path = mesh, group, path

    def write(self, tensors: Mapping[str, Tensors], facts: Mapping[str, Any]) -> None:
        unfinished = self._begin(list(tensors))
        error: str | None = None
        digests: dict[str, str] = {}
        try:
            for folder, content in tensors.items():  # each raises on all processes or on none
                self._write_shard(unfinished / folder, dict(content))
            digests = self._digests_of_own(unfinished)
        except CheckpointException as failed:  # no Exception to torch; all processes raise it
            error = "; ".join(
                f"rank {r}: {problem}" for r, (problem, _) in failed.failures.items()
            )
        except Exception as problem:
            error = self._account(problem)
        everyone = self._gather((error, digests))
        errors = list(dict.fromkeys(said for said, _ in everyone if said is not None))
        if not errors:
            all_digests = {name: digest for _, part in everyone for name, digest in part.items()}
            errors = self._finish(unfinished, facts, all_digests)
        if errors:
            if self._mesh.is_first_rank:
                shutil.rmtree(unfinished, ignore_errors=True)
            raise CheckpointError(
                f"cannot write the checkpoint {self._path}: {'; '.join(errors)}; nothing is left "
                "of it. Make room, or choose another place that all processes reach"
            )

    def _begin(self, folders: list[str]) -> Path:
        """Let rank 0 make the hidden folder and those in it; give its name to all."""
        told: list[Any] = [None, None]
        if self._mesh.is_first_rank:
            try:
                told[0] = str(_make_unfinished(self._path, folders))
            except (OSError, CheckpointError) as error:
                told[1] = str(error)
        dist.broadcast_object_list(told, src=0, group=self._group)
        if told[1] is not None:
            raise CheckpointError(told[1])
        return Path(told[0])

    def _write_shard(self, folder: Path, content: dict[str, Any]) -> None:
        writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
        save(content, storage_writer=writer, process_group=self._group)

    def _digests_of_own(self, unfinished: Path) -> dict[str, str]:
        """Force what this process wrote to its disk, and give the digests."""
        own = unfinished.glob(f"*/shard-{self._mesh.rank + 1:05d}-*")
        return {file.relative_to(unfinished).as_posix(): digest_and_force(file) for file in own}

    def _finish(
        self, unfinished: Path, facts: Mapping[str, Any], digests: dict[str, str]
    ) -> list[str]:
        """Let rank 0 complete the folder; give what went wrong."""
        told: list[str | None] = [None]
        if self._mesh.is_first_rank:
            try:
                finish_folder(unfinished, self._path, facts, digests)
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


def _make_unfinished(path: Path, folders: list[str]) -> Path:
    refuse_existing(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    made = tempfile.mkdtemp(prefix=f".{path.name}.", suffix=UNFINISHED, dir=path.parent)
    Path(made).chmod(0o755)  # mkdtemp makes it private; other processes may be other hosts'
    for folder in folders:
        (Path(made) / folder).mkdir()
    return Path(made)
