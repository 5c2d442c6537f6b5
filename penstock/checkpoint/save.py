"""Save a model, its optimizer and whatever else a run needs to go on."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from penstock.errors import CheckpointError
from penstock.mesh import Mesh
from penstock.pipeline import Pipeline
from penstock.zero import is_sharded

from .files import MODEL, OPTIMIZER, UNFINISHED, jsonable, read_facts, read_tensors, write_folder
from .optimizer_state import merge_optimizers, pack_optimizer
from .saving import Saving, in_thread
from .together import MODEL_FOLDER, OPTIMIZER_FOLDER, begin_together


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
    well, for its random streams.  `state` is anything JSON can hold (tuples come back as lists),
    such as a learning-rate scheduler's or a GradScaler's `state_dict()`.

    In a mesh of processes all of them call this alike.  Each stage of the first replica writes its
    own shard, and each replica the optimizer state that it alone holds (`zero_optimizer`);
    `export_model` makes one file of the model's.  All of it must be written within the mesh's
    `timeout_s`.

    Raises:
        CheckpointError: `path` exists; `state` is not JSON; the optimizer is not the module's; the
            disk is full or refuses.
    """
    content = _collect(module, optimizer, state, copy=False)
    mesh = _mesh_of(module)
    if mesh is None:
        write_folder(Path(path), content.tensors, content.facts)
    else:
        begin_together(mesh, Path(path), content.tensors, content.facts).wait()


def async_save_checkpoint(
    path: str | os.PathLike[str],
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    **state: Any,
) -> Saving:
    """Save like `save_checkpoint`, but return as soon as all tensors are copied to CPU memory.

    Training may go on at once: what is written is what was there when this was called.  Until it
    is written the copy takes as much memory as this process's share of the checkpoint.  Several
    saves of a mesh of processes are written one after the other.

    Returns:
        The save under way; `wait()` for it before the process ends, to learn whether it went well.

    Raises:
        CheckpointError: as `save_checkpoint`; what only shows while writing is raised by `wait()`.
    """
    content = _collect(module, optimizer, state, copy=True)
    mesh = _mesh_of(module)
    if mesh is None:
        target = Path(path)
        return in_thread(target, lambda: write_folder(target, content.tensors, content.facts))
    return begin_together(mesh, Path(path), content.tensors, content.facts)


def _mesh_of(module: nn.Module) -> Mesh | None:
    mesh = module.mesh if isinstance(module, Pipeline) else None
    return mesh if mesh is not None and mesh.is_distributed else None


@dataclass(frozen=True, slots=True)
class _Content:
    """What this process writes, `tensors[file or folder][name]`, and what describes all of it."""

    tensors: dict[str, dict[str, Tensor]]
    facts: dict[str, Any]


def _collect(
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    state: dict[str, Any],
    *,
    copy: bool,
) -> _Content:
    """Gather what is saved; in a mesh of processes, all of them raise what one of them must.

    Raises:
        CheckpointError: something cannot be saved.
    """
    mesh = _mesh_of(module)
    if mesh is not None:
        return _collect_together(mesh, module, optimizer, state, copy=copy)
    tensors = {MODEL: _storable(module.state_dict(), copy=copy)}
    facts = _facts(module, state)
    if optimizer is not None:
        content, facts["optimizer"] = pack_optimizer(optimizer, module)
        tensors[OPTIMIZER] = _storable(content, copy=copy)
    return _Content(tensors, facts)


def _facts(module: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    facts: dict[str, Any] = {"pipeline": None, "optimizer": None, "state": state}
    if isinstance(module, Pipeline):
        facts["pipeline"] = {"step": module.step, "seed": module.seed}
    return jsonable(facts)


def _collect_together(
    mesh: Mesh,
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    state: dict[str, Any],
    *,
    copy: bool,
) -> _Content:
    tensors: dict[str, dict[str, Tensor]] = {}
    mine: dict[str, Any] | None = None
    facts: dict[str, Any] = {}
    error: str | None = None
    try:
        facts = _facts(module, state)
        tensors[MODEL_FOLDER] = _storable(module.state_dict(), copy=copy)
        if optimizer is not None:
            content, mine = pack_optimizer(optimizer, module)
            tensors[OPTIMIZER_FOLDER] = _storable(content, copy=copy)
    except Exception as problem:
        error = f"rank {mesh.rank}: {problem}"
    parts = mesh.gather((error, mine), "for the others to save the same checkpoint")
    if errors := [said for said, _ in parts if said is not None]:
        raise CheckpointError("; ".join(errors))
    is_shared = optimizer is not None and is_sharded(optimizer)
    if optimizer is not None:
        facts["optimizer"] = merge_optimizers(
            [part for _, part in (parts if is_shared else parts[: mesh.num_stages])]
        )
    if mesh.replica > 0:  # the first replica writes what all replicas hold
        tensors = {
            folder: content if is_shared and folder == OPTIMIZER_FOLDER else {}
            for folder, content in tensors.items()
        }
    return _Content(tensors, facts)


def _storable(tensors: dict[str, Any], *, copy: bool) -> dict[str, Tensor]:
    """Give contiguous tensors, no two of which share memory, as safetensors wants them.

    With `copy`, none shares memory with the model either, and all are on the CPU.
    """
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
        if copy and not plain.is_cpu:
            plain = plain.cpu()
        elif copy or storage in seen:
            plain = plain.clone()
        result[name] = plain
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
