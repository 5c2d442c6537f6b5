"""Save a model, its optimizer and whatever else a run needs to go on."""

import json
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from penstock.errors import CheckpointError
from penstock.model.state import read_extra
from penstock.runtime.pipeline_module import is_pipeline
from penstock.runtime.shards.at_rest import weight_of
from penstock.sharding.layouts import Slice

from .files import (
    EXTRA,
    MODEL,
    OPTIMIZER,
    SUFFIX,
    UNFINISHED,
    digest_of_file,
    force_to_disk,
    jsonable,
    refuse_existing,
    write_state,
)
from .optimizer_state import merge_optimizers, pack_optimizer
from .reader import CheckpointReader, header_of, refuse_wide, save_tensors
from .together import Digests, Saving, Share, agreed, begin, write_together

_Files = dict[str, tuple[dict[str, Tensor], Mapping[str, Slice]]]
"""By file: the tensors that a process writes, and the slices that some of them are."""


def save_checkpoint(
    path: str | os.PathLike[str],
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    **state: Any,
) -> None:
    """Save `module`, a Pipeline or any nn.Module, as a folder that appears whole or not at all.

    The tensors go under the model's own names: the unsplit model and a pipeline of any other
    number of stages load them.  A tensor with several names is stored under each, so that a plain
    `load_state_dict` of model.safetensors works.  Modules' `get_extra_state` may return tensors or
    JSON values.  A pipeline's step count and seed are saved too, for its random streams.  `state`
    is anything JSON can hold (tuples come back as lists), such as a learning-rate scheduler's or a
    GradScaler's `state_dict()`.

    In a mesh of processes all of them call this alike.  Each process of the first replica writes
    a file with the tensors of its stages.  Weights that processes share (`Pipeline(sharding=)`)
    are written in slices, in the format of torch.distributed.checkpoint.  `export_model` joins the
    model's files.  Writing may take any time: the mesh's `timeout_s` counts only for a process
    that does not answer.

    Raises:
        CheckpointError: `path` exists; `state` or extra state of a module is not JSON; the
            optimizer is not the module's; the disk is full or refuses.
        PeerError: another process failed, or is gone.
        WaitTimeout: another process does not answer.
    """
    _begin(path, module, optimizer, state, copy=False).wait()


def async_save_checkpoint(
    path: str | os.PathLike[str],
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    **state: Any,
) -> Saving:
    """Save like `save_checkpoint`, but return as soon as all tensors are copied to CPU memory.

    Training may go on at once: the checkpoint has the values at this call.  Until it is written,
    a copy takes the memory of this process's share.  Several saves in a mesh of processes are
    written one after the other.

    Returns:
        The save under way; `wait()` for it before the process ends, to learn whether it went well.

    Raises:
        CheckpointError: as `save_checkpoint`; what only shows while writing is raised by `wait()`.
    """
    return _begin(path, module, optimizer, state, copy=True)


def _begin(
    path: str | os.PathLike[str],
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    state: dict[str, Any],
    *,
    copy: bool,
) -> Saving:
    """Gather what is saved, and begin to write it; an error of one process is raised on all."""
    target = Path(path).absolute()  # the process may go elsewhere meanwhile
    share = begin("save_checkpoint", module)
    mesh = share.mesh

    # 1. Collect the tensors and facts of each rank.
    def collect() -> tuple[_Files, dict[str, Any]]:
        if mesh.is_first_rank:
            refuse_existing(target)
        return _collect(share, module, optimizer, state, copy=copy)

    (files, facts), answers = agreed(
        mesh,
        collect,
        lambda both: {key: both[1][key] for key in ("optimizer", "files", "slices", EXTRA)},
        "for the others to save the same checkpoint",
    )
    # 2. Merge the facts of all ranks; replicas have equal optimizer states.
    parts = [part.pop("optimizer") for part in answers]
    without = [str(rank) for rank, part in enumerate(parts) if part is None]
    if without and len(without) < len(parts):
        raise CheckpointError(
            f"rank {', '.join(without)} saves without an optimizer, the others with one; give one "
            "on every rank, of pipe.parameters()"
        )
    if not without:
        firsts = [rows[0][0] for rows in mesh.placement.meshes] if mesh.world_size > 1 else [0]
        facts["optimizer"] = merge_optimizers([parts[rank] for rank in firsts])
    for key in answers[0]:
        facts[key] = {name: value for part in answers for name, value in part[key].items()}
    # 3. Write in the background.
    write, finish = partial(_write, files), partial(write_state, facts)
    return write_together(mesh, target, refuse_existing, write, finish)


def _collect(
    share: Share,
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    state: dict[str, Any],
    *,
    copy: bool,
) -> tuple[_Files, dict[str, Any]]:
    """Return the files that this process writes, and its facts for state.json."""
    mesh, held, _ = share
    # 1. Facts of the pipeline.
    facts: dict[str, Any] = {"pipeline": None, "optimizer": None, "state": state}
    if is_pipeline(module):
        noted = ("step", "evaluations", "seed")
        facts["pipeline"] = {name: getattr(module, name) for name in noted}
    # 2. Tensors, by file.
    extra, values = read_extra(held.owners)
    contents = {MODEL: {**held.state(), **extra}}
    if optimizer is not None:
        contents[OPTIMIZER], facts["optimizer"] = pack_optimizer(optimizer, module)
    facts = {**jsonable(facts), EXTRA: values if mesh.is_first_of_stage else {}}
    files, facts["files"], facts["slices"] = _Files(), {}, {}
    # 3. Of each file, the tensors that this rank writes, in a file of its own.
    for file, content in contents.items():
        written, slices = _own_of(content, share, of_optimizer=file == OPTIMIZER)
        if written or mesh.world_size == 1:
            if mesh.world_size > 1:
                file = f"{file.removesuffix(SUFFIX)}/shard-{mesh.rank + 1:05d}{SUFFIX}"
            files[file] = storable(written, copy=copy), slices
            facts["files"][file] = list(written)
            facts["slices"][file] = {n: part[:2] for n, part in slices.items() if n in written}
    return files, facts


def _own_of(
    content: dict[str, Any], share: Share, *, of_optimizer: bool
) -> tuple[dict[str, Any], dict[str, Slice]]:
    """Return what this process writes: tensors that it is the first to hold, and its slices."""
    mesh, _, shards = share
    axes = (*mesh.shard_axes, mesh.replicas.tensors)
    cut = shards.slices(content, of_optimizer=of_optimizer)
    slices = {name: part for name, part in cut.items() if content[name].shape == part.lengths}

    def is_own(name: str, value: Any) -> bool:
        if name not in slices:
            return mesh.is_first_of_stage
        return value.numel() > 0 and shards.is_first(weight_of(name, of_optimizer), axes)

    return {name: value for name, value in content.items() if is_own(name, value)}, slices


def _write(files: _Files, folder: Path) -> Digests:
    """Write files, and force them to the disk; return their digests."""
    digests = {}
    for name, (tensors, slices) in files.items():
        file = folder / name
        file.parent.mkdir(exist_ok=True)
        save_tensors(tensors, file, header_of(tensors, slices))
        force_to_disk(file)
        digests[name] = digest_of_file(file)
    return digests


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
    refuse_existing(target)
    saved = CheckpointReader(path)
    saved.verify()
    tensors = saved.read_model(saved.model_names)
    refuse_wide(tensors)
    unfinished = target.with_name(f".{target.name}{UNFINISHED}")
    try:
        save_file(tensors, unfinished, {EXTRA: json.dumps(saved.extra)} if saved.extra else None)
        unfinished.rename(target)
    except (OSError, SafetensorError) as error:
        unfinished.unlink(missing_ok=True)
        raise CheckpointError(f"cannot write {target}: {error}") from error
