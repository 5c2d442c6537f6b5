"""Save a model in the layout of Hugging Face's libraries, from all processes at once."""

import copy
import json
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import save_file
from torch import Tensor, nn

from penstock.checkpoint.files import force_to_disk, refuse_existing
from penstock.checkpoint.pretrained.folder import (
    EXTRA,
    INDEX,
    MODEL,
    as_saved,
    fits,
    patterns_of,
)
from penstock.checkpoint.reader import refuse_wide
from penstock.checkpoint.save import storable
from penstock.checkpoint.together import Digests, begin, write_together
from penstock.errors import check_count
from penstock.model.state import read_extra
from penstock.runtime.pipeline_module import parts_of

if TYPE_CHECKING:
    from penstock.pipeline import Pipeline

_Shards = Mapping[str, tuple[int, Sequence[str]]]
"""Of each file, the rank that writes it and the names of its tensors."""
MAX_SHARD_BYTES = 5_000_000_000
"""Of a file that a process writes, if nothing else is asked for."""


def save_pretrained(
    folder: str | os.PathLike[str],
    pipe: "Pipeline",
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Save a model so that `from_pretrained` of Hugging Face's libraries loads it.

    Writes config.json and generation_config.json, if the model has them, and model.safetensors,
    or files model-00001-of-0000N.safetensors with model.safetensors.index.json.  The folder
    appears whole or not at all.  A parameter with several names is saved once, under the name that
    the model's class keeps.  What modules' `get_extra_state` gives is saved with the tensors if it
    is one, else in extra_state.json, which Hugging Face's libraries do not read.

    In a mesh of processes all of them call this alike.  The first of each stage writes its
    tensors, those in shards put together in its memory, in files of at most `max_shard_bytes` (a
    larger tensor has one to itself).

    Raises:
        CheckpointError: `folder` exists and is not empty; extra state of a module is neither a
            tensor nor JSON; a tensor is complex128; the disk is full or refuses.
        ConfigError: `max_shard_bytes` is no whole number of at least 1.
    """
    target, original = Path(folder).absolute(), pipe.original
    most = check_count("max_shard_bytes", max_shard_bytes)
    mesh = begin("save_pretrained", pipe).mesh
    with mesh.reporting():
        tensors, values = _to_save(pipe, original)
        refuse_wide(tensors)
    # Each process tells its sizes; all compute the same files from them.
    sizes = [(name, tensor.nbytes) for name, tensor in tensors.items()]
    everyone = mesh.world.gather((sizes, values), "for the others to save the same model")
    shards = _deal([sizes for sizes, _ in everyone], most)
    num_bytes = sum({name: size for sizes, _ in everyone for name, size in sizes}.values())
    values = {name: value for _, part in everyone for name, value in part.items()}
    write = partial(_write_own, shards, mesh.rank, tensors)
    finish = partial(_finish, shards, num_bytes, original, values)
    refuse = partial(refuse_existing, allows_empty=True)
    write_together(mesh, target, refuse, write, finish).wait()


def _to_save(pipe: "Pipeline", original: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors that this process writes, by saved name, and other extra state."""
    tied = patterns_of(original, "all_tied_weights_keys", "_tied_weights_keys")
    ignored = patterns_of(original, "_keys_to_ignore_on_save")
    parts, writes, tensors = parts_of(pipe), pipe.mesh.is_first_of_stage, {}
    for names, tensor in parts.held.own_tensors().items():
        saved_names = [name for name in names if not fits(name, tied)] or list(names)
        if not fits(saved_names[0], ignored):
            whole = parts.shards.whole({names[0]: tensor})
            if writes:
                tensors[saved_names[0]] = whole[names[0]]
    if not writes:
        return {}, {}
    owners = {n: owner for n, owner in parts.held.owners.items() if not fits(n, ignored)}
    extra, values = read_extra(owners)
    return storable({**as_saved(original, tensors), **extra}, copy=False), values


def _deal(everyone: Sequence[Sequence[tuple[str, int]]], most: int) -> _Shards:
    """Distribute tensors over files; the first process that has a tensor writes it."""
    known: set[str] = set()
    shards: list[tuple[int, list[str]]] = []
    for rank, sizes in enumerate(everyone):
        filled = most + 1  # the first one begins a file
        for name, num_bytes in ((n, size) for n, size in sizes if n not in known):
            known.add(name)
            filled += num_bytes
            if filled > most:
                shards.append((rank, []))
                filled = num_bytes
            shards[-1][1].append(name)
    if len(shards) == 1:
        return {MODEL: shards[0]}
    stem, _, suffix = MODEL.rpartition(".")
    count = len(shards)
    return {f"{stem}-{n + 1:05d}-of-{count:05d}.{suffix}": shards[n] for n in range(count)}


def _write_own(shards: _Shards, rank: int, values: Mapping[str, Tensor], folder: Path) -> Digests:
    mine = {file: tensors for file, (writer, tensors) in shards.items() if writer == rank}
    for file, tensors in mine.items():
        save_file({tensor: values[tensor] for tensor in tensors}, folder / file, {"format": "pt"})
        force_to_disk(folder / file)
    return dict.fromkeys(mine, "")


def _finish(
    shards: _Shards,
    num_bytes: int,
    original: nn.Module,
    values: Mapping[str, Any],
    folder: Path,
    _: Digests,
) -> None:
    if len(shards) > 1:
        weight_map = {tensor: file for file, (_, names) in shards.items() for tensor in names}
        index = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (folder / INDEX).write_text(text, encoding="utf-8")
    if values:
        (folder / EXTRA).write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    _save_configuration(original, folder)


def _save_configuration(original: nn.Module, folder: Path) -> None:
    """Write config.json and generation_config.json, as the model's library does."""
    config: Any = getattr(original, "config", None)
    if not hasattr(config, "save_pretrained"):
        return
    noted = copy.deepcopy(config)
    noted.architectures = [type(original).__name__]
    dtype = next((p.dtype for p in original.parameters() if p.is_floating_point()), None)
    if dtype is not None:
        noted.dtype = str(dtype).removeprefix("torch.")
    noted.save_pretrained(folder)
    generation: Any = getattr(original, "generation_config", None)
    if hasattr(generation, "save_pretrained"):
        generation.save_pretrained(folder)
