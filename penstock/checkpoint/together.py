"""Save and load from many processes: each writes and reads the tensors of its own stage.

    model/*.safetensors       one shard a stage, by torch.distributed.checkpoint
    optimizer/*.safetensors   likewise
    state.json                as ever; rank 0 writes it when all shards are there

The processes of replica 0 write.  The folder has a hidden name until it is complete.
"""

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_saver import save

from penstock.errors import CheckpointError
from penstock.mesh import Mesh

from .files import UNFINISHED, finish_folder, jsonable

MODEL_FOLDER, OPTIMIZER_FOLDER = "model", "optimizer"

Tensors = Mapping[str, Tensor]


def write_together(
    mesh: Mesh, path: Path, tensors: Mapping[str, Tensors], facts: Mapping[str, Any]
) -> None:
    """Write `tensors[folder][name]` of all processes, and rank 0's `facts`, as one folder.

    Raises:
        CheckpointError: `path` exists, or a disk refuses; on every process alike.
    """
    unfinished = _begin(mesh, path, list(tensors))
    error: str | None = None
    try:
        if mesh.replica == 0:
            for folder, content in tensors.items():
                _write_shard(mesh, unfinished / folder, dict(content))
        if mesh.is_first_rank:
            finish_folder(unfinished, path, jsonable(facts))
    except Exception as problem:
        error = f"rank {mesh.rank}: {problem}"
    _raise_alike(mesh, path, error, unfinished)


def _begin(mesh: Mesh, path: Path, folders: list[str]) -> Path:
    """Let rank 0 make the hidden folder and those in it; give its name to all."""
    told: list[Any] = [None, None]
    if mesh.is_first_rank:
        try:
            told[0] = str(_make_unfinished(path, folders))
        except (OSError, CheckpointError) as error:
            told[1] = str(error)
    _run(mesh, lambda: dist.broadcast_object_list(told, src=0))
    if told[1] is not None:
        raise CheckpointError(told[1])
    return Path(told[0])


def _make_unfinished(path: Path, folders: list[str]) -> Path:
    if path.exists():
        raise CheckpointError(
            f"{path} exists already and is never overwritten; choose another name"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    made = tempfile.mkdtemp(prefix=f".{path.name}.", suffix=UNFINISHED, dir=path.parent)
    for folder in folders:
        (Path(made) / folder).mkdir()
    return Path(made)


def _write_shard(mesh: Mesh, folder: Path, content: dict[str, Any]) -> None:
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    group = mesh.group("stage")
    _run(mesh, lambda: save(content, storage_writer=writer, process_group=group))


def _raise_alike(mesh: Mesh, path: Path, error: str | None, unfinished: Path) -> None:
    """Gather what went wrong anywhere; clean up and raise it everywhere."""
    everyone: list[str | None] = [None] * mesh.world_size
    _run(mesh, lambda: dist.all_gather_object(everyone, error))
    errors = [said for said in everyone if said is not None]
    if not errors:
        return
    if mesh.is_first_rank:
        shutil.rmtree(unfinished, ignore_errors=True)
    raise CheckpointError(
        f"cannot write the checkpoint {path}: {'; '.join(errors)}; nothing is left of it"
    )


def gather_from_all(mesh: Mesh, mine: Any) -> list[Any]:
    """Give what each process has, in the order of ranks."""
    everyone: list[Any] = [None] * mesh.world_size
    _run(mesh, lambda: dist.all_gather_object(everyone, mine))
    return everyone


def merge_optimizers(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Make one optimizer's facts of those of all stages.

    Raises:
        CheckpointError: the stages' optimizers are not of one kind with the same groups.
    """
    first = parts[0]
    for stage, part in enumerate(parts):
        same = part["kind"] == first["kind"] and len(part["groups"]) == len(first["groups"])
        if not same:
            raise CheckpointError(
                f"the optimizer of stage {stage} is {part['kind']} with {len(part['groups'])} "
                f"parameter groups, that of stage 0 {first['kind']} with {len(first['groups'])}; "
                "make the same one on every rank"
            )
    groups = [
        {
            "parameters": [name for part in parts for name in part["groups"][n]["parameters"]],
            "options": first["groups"][n]["options"],
        }
        for n in range(len(first["groups"]))
    ]
    values = {name: value for part in parts for name, value in part["values"].items()}
    return {"kind": first["kind"], "groups": groups, "values": values}


def _run(mesh: Mesh, job: Any) -> None:
    assert mesh.background is not None
    mesh.background.run(job, "for the checkpoint to be written and read by all")
