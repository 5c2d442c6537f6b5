"""Save a model, its optimizer and whatever else a run needs to go on."""

import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from penstock.errors import CheckpointError
from penstock.mesh import Mesh
from penstock.pipeline import Pipeline

from .files import MODEL, OPTIMIZER, UNFINISHED, read_facts, read_tensors, write_folder
from .optimizer_state import pack_optimizer
from .together import (
    MODEL_FOLDER,
    OPTIMIZER_FOLDER,
    gather_from_all,
    merge_optimizers,
    write_together,
)


def save_checkpoint(
    path: str | os.PathLike[str],
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    **state: Any,
) -> None:
    """Save `module`, a Pipeline or any nn.Module, as a folder that appears whole or not at all.

    The tensors go under the model's own names: the unsplit model and a pipeline of any other
    number of stages load them.  A tensor with several names is stored under each, so that a plain
    `load_state_dict` of model.safetensors works.  A pipeline's step count and seed are saved as
    well, for its random streams.  `state` is anything JSON can hold (tuples come back as lists).

    In a mesh of processes all of them call this alike.  Each stage of the first replica writes its
    own shard; `export_model` makes one file of them.

    Raises:
        CheckpointError: `path` exists; `state` is not JSON; the optimizer is not the module's; the
            disk is full or refuses.
    """
    mesh = module.mesh if isinstance(module, Pipeline) else None
    if mesh is not None and mesh.is_distributed:
        _save_from_many(Path(path), mesh, module, optimizer, state)
        return
    tensors = {MODEL: _storable(module.state_dict())}
    facts = _facts(module, state)
    if optimizer is not None:
        content, facts["optimizer"] = pack_optimizer(optimizer, module)
        tensors[OPTIMIZER] = _storable(content)
    write_folder(Path(path), tensors, facts)


def _facts(module: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    facts: dict[str, Any] = {"pipeline": None, "optimizer": None, "state": state}
    if isinstance(module, Pipeline):
        facts["pipeline"] = {"step": module.step, "seed": module.seed}
    return facts


def _save_from_many(
    path: Path,
    mesh: Mesh,
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    state: dict[str, Any],
) -> None:
    tensors: dict[str, dict[str, Tensor]] = {}
    mine: dict[str, Any] | None = None
    error: str | None = None
    try:
        tensors[MODEL_FOLDER] = _storable(module.state_dict())
        if optimizer is not None:
            content, mine = pack_optimizer(optimizer, module)
            tensors[OPTIMIZER_FOLDER] = _storable(content)
    except Exception as problem:
        error = f"rank {mesh.rank}: {problem}"
    parts = gather_from_all(mesh, (error, mine))
    if errors := [said for said, _ in parts if said is not None]:
        raise CheckpointError("; ".join(errors))
    facts = _facts(module, state)
    if optimizer is not None:
        facts["optimizer"] = merge_optimizers([part for _, part in parts[: mesh.num_stages]])
    write_together(mesh, path, tensors, facts)


def _storable(tensors: dict[str, Any]) -> dict[str, Tensor]:
    """Give contiguous tensors, no two of which share memory, as safetensors wants them."""
    seen: set[int] = set()
    result = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise CheckpointError(
                f"{name!r} in the model's state is a {type(tensor).__name__}; only tensors can be "
                "saved. Register it as a buffer, or leave it out of the state"
            )
        storage = tensor.untyped_storage().data_ptr()
        plain = tensor.detach().contiguous()
        result[name] = plain.clone() if storage in seen else plain
        seen.add(storage)
    return result


def export_model(path: str | os.PathLike[str], file: str | os.PathLike[str]) -> None:
    """Write the model of a checkpoint, however many shards it is in, as one safetensors file.

    The unsplit model loads it with a plain `load_state_dict`.

    Raises:
        CheckpointError: `path` is no checkpoint, or damaged; `file` exists or cannot be written.
    """
    target = Path(file)
    if target.exists():
        raise CheckpointError(
            f"{target} exists already and is never overwritten; choose another name"
        )
    read_facts(Path(path))
    unfinished = target.with_name(f".{target.name}{UNFINISHED}")
    try:
        save_file(read_tensors(Path(path), MODEL), unfinished)
        unfinished.rename(target)
    except (OSError, SafetensorError) as error:
        unfinished.unlink(missing_ok=True)
        raise CheckpointError(f"cannot write {target}: {error}") from error
