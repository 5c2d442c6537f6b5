"""Save a model, its optimizer and whatever else a run needs to go on."""

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from penstock.errors import CheckpointError
from penstock.mesh import Mesh
from penstock.mesh.threads import in_thread
from penstock.model.extra_state import read_extra
from penstock.runtime.construction import is_pipeline
from penstock.runtime.shards.at_rest import CutWeights, weight_of
from penstock.sharding.layouts import Slice

from .complex_pairs import refuse_wide
from .files import (
    EXTRA,
    MODEL,
    OPTIMIZER,
    UNFINISHED,
    jsonable,
    read_facts,
    refuse_existing,
    write_folder,
)
from .optimizer_state import merge_optimizers, pack_optimizer
from .pieces import read_all
from .processes import agreed, begin, held_of, shards_of
from .together import MODEL_FOLDER, OPTIMIZER_FOLDER, Content, Saving, begin_together


def save_checkpoint(
    path: str | os.PathLike[str],
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    **state: Any,
) -> None:
    """Save `module`, a Pipeline or any nn.Module, as a folder that appears whole or not at all.

    The tensors go under the model's own names: the unsplit model and a pipeline of any other
    number of stages load them.  A tensor with several names is stored under each, so that a plain
    `load_state_dict` of model.safetensors works.  Modules' `get_extra_state` may give tensors, or
    what JSON gives back as it is.  A pipeline's step count and seed are saved as
    well, for its random streams.  `state` is anything JSON can hold (tuples come back as lists),
    such as a learning-rate scheduler's or a GradScaler's `state_dict()`.

    In a mesh of processes all of them call this alike.  Each writes its own file: the first
    replica, the tensors of its stages; of weights that processes share (`Pipeline(sharding=)`),
    each its slices, as torch.distributed.checkpoint writes them in safetensors files.
    `export_model` makes one file of the model's.  However long they write, the mesh's `timeout_s`
    counts only for a process that does not answer that it is at work.

    Raises:
        CheckpointError: `path` exists; `state` or extra state of a module is not JSON; the
            optimizer is not the module's; the disk is full or refuses.
        PeerError: another process failed, or is gone.
        WaitTimeout: another process does not answer.
    """
    target = Path(path).absolute()
    content = _collect(target, module, optimizer, state, copy=False)
    if content.mesh.world_size > 1:
        begin_together(target, content).wait()
    else:
        write_folder(target, content.tensors, content.facts)


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
    target = Path(path).absolute()  # the process may go elsewhere meanwhile
    content = _collect(target, module, optimizer, state, copy=True)
    if content.mesh.world_size > 1:
        return begin_together(target, content)
    write = partial(write_folder, target, content.tensors, content.facts)
    return Saving(target, in_thread(write, "penstock-save", daemon=False).result)


def _collect(
    target: Path,
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    state: dict[str, Any],
    *,
    copy: bool,
) -> Content:
    """Gather what is saved; in a mesh of processes, all of them raise what one of them must.

    Raises:
        CheckpointError: something cannot be saved.
    """
    mesh, held, shards = begin("save_checkpoint", module), held_of(module), shards_of(module)
    of_model, of_optimizer = (
        (MODEL_FOLDER, OPTIMIZER_FOLDER) if mesh.world_size > 1 else (MODEL, OPTIMIZER)
    )

    def own() -> Content:
        if mesh.is_first_rank:
            refuse_existing(target)
        extra, values = read_extra(held.owners)
        found = {of_model: {**held.state(), **extra}}
        facts = {**_facts(module, state), EXTRA: values if mesh.is_first_of_stage else {}}
        if optimizer is not None:
            content, packed = pack_optimizer(optimizer, module)
            facts["optimizer"] = jsonable(packed)
            found[of_optimizer] = content
        tensors, slices = {}, {}
        for place, content in found.items():
            written, slices[place] = _own_of(content, shards, mesh, place == of_optimizer)
            tensors[place] = storable(written, copy=copy)
        return Content(mesh, tensors, slices, facts)

    content, told = agreed(
        mesh,
        own,
        lambda own: (own.facts["optimizer"], *own.places, own.facts[EXTRA]),
        "for the others to save the same checkpoint",
    )
    parts = [part for part, *_ in told]
    without = [str(rank) for rank, part in enumerate(parts) if part is None]
    if without and len(without) < len(parts):
        raise CheckpointError(
            f"rank {', '.join(without)} saves without an optimizer, the others with one; give one "
            "on every rank, of pipe.parameters()"
        )
    if optimizer is not None:
        firsts = [rows[0][0] for rows in mesh.placement.meshes] if mesh.world_size > 1 else [0]
        content.facts["optimizer"] = merge_optimizers([parts[rank] for rank in firsts])
    for key, place in (("files", 1), ("slices", 2), (EXTRA, 3)):
        content.facts[key] = {name: value for own in told for name, value in own[place].items()}
    return content


def _own_of(
    content: dict[str, Any], shards: CutWeights, mesh: Mesh, of_optimizer: bool
) -> tuple[dict[str, Any], dict[str, Slice]]:
    """Return what this process writes: what others have too, the first one of them; and which
    part of a tensor it has.
    """
    axes = (*mesh.shard_axes, mesh.replicas.tensors)
    cut = shards.slices(content, of_optimizer=of_optimizer)
    slices = {name: own for name, own in cut.items() if content[name].shape == own.lengths}
    written = {}
    for name, value in content.items():
        if name in slices:
            is_own = shards.is_first(weight_of(name, of_optimizer), axes) and value.numel() > 0
        else:
            is_own = mesh.is_first_of_stage
        if is_own:
            written[name] = value
    return written, {name: own for name, own in slices.items() if name in written}


def _facts(module: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    facts: dict[str, Any] = {"pipeline": None, "optimizer": None, "state": state}
    if is_pipeline(module):
        facts["pipeline"] = {
            "step": module.step,
            "evaluations": module.evaluations,
            "seed": module.seed,
        }
    return jsonable(facts)


def storable(tensors: dict[str, Any], *, copy: bool) -> dict[str, Tensor]:
    """Return contiguous tensors, no two of which share memory, as safetensors wants them.

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

    The unsplit model loads it with a plain `load_state_dict`.  Extra state of modules that is no
    tensor is in the file's metadata, as JSON by name under "extra_state".

    Raises:
        CheckpointError: `path` is no checkpoint, or damaged; `file` exists or cannot be written.
    """
    target = Path(file)
    if target.exists():
        raise CheckpointError(
            f"{target} exists already and is never overwritten; choose another name"
        )
    facts = read_facts(Path(path))
    values = facts.get(EXTRA)
    unfinished = target.with_name(f".{target.name}{UNFINISHED}")
    try:
        metadata = {EXTRA: json.dumps(values)} if values else None
        tensors = read_all(Path(path), MODEL, facts)
        refuse_wide(tensors)
        save_file(tensors, unfinished, metadata)
        unfinished.rename(target)
    except (OSError, SafetensorError) as error:
        unfinished.unlink(missing_ok=True)
        raise CheckpointError(f"cannot write {target}: {error}") from error
