"""Load a folder of Hugging Face's: each process reads its tensors; errors are raised on all."""

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from penstock.checkpoint.together import Share, agreed, begin, refuse_foreign
from penstock.model.materialize import may_be_absent
from penstock.model.state import extra_faults, set_extra
from penstock.runtime.shards.at_rest import CutWeights
from penstock.sharding.layouts import Slice

from .folder import Folder, Read, Source, as_it_is, as_loaded, fits, patterns_of


class Sources:
    """Finds, among the tensors `there` of a folder, those that give a tensor its values.

    The names are the model's own, with or without the name of the base model.  Where transformers
    renames, fuses or splits tensors of older files as it loads them, its own rules are used.
    """

    def __init__(self, original: nn.Module, there: Iterable[str]) -> None:
        base = getattr(original, "base_model_prefix", "")
        self._prefix = f"{base}." if isinstance(base, str) and base else ""
        self._by_name = {name: as_it_is(name, name) for name in there}
        self._by_name = {**dict(as_loaded(original, list(self._by_name))), **self._by_name}

    def of(self, names: Iterable[str]) -> Iterator[tuple[str, Source]]:
        """Yield (name, source) for each of a tensor's `names` that the folder has; mostly one."""
        candidates = dict.fromkeys(c for name in names for c in self._candidates(name))
        for name in candidates:
            if name in self._by_name:
                yield name, self._by_name[name]

    def _candidates(self, name: str) -> Iterator[str]:
        yield name
        if self._prefix:
            short = name.removeprefix(self._prefix)
            yield short if short != name else self._prefix + name


@dataclass(frozen=True, slots=True)
class _Match:
    """A tensor, the (name, source) pairs in the folder that have its values, and its part here."""

    name: str
    tensor: Tensor
    sources: tuple[tuple[str, Source], ...]
    part: Slice


def load_pretrained(folder: str | os.PathLike[str], pipe: nn.Module) -> tuple[str, ...]:
    """Load a model that Hugging Face's `save_pretrained` wrote, or `penstock.save_pretrained`.

    The folder holds model.safetensors, or model.safetensors.index.json and the files it names.
    Each process opens only the files that hold tensors of its own stages, and reads only those
    tensors, of weights in shards its slices; nothing is unpickled.  Names are the model's own.  A
    parameter with several names may go by any of them, and names may have or lack the
    `base_model_prefix` that the model's class gives.  Values are copied into the parameters and
    buffers that are there, and so take their dtype.  To spare a model on the meta device the
    drawing of values, give `Pipeline(..., weights=folder)` instead.

    In a mesh of processes all of them call this alike.

    Returns:
        Names of tensors in the folder that the model has no place for; mostly none.

    Raises:
        CheckpointError: the folder is none, or is damaged, or holds no safetensors file; lists
            every tensor that is missing or of another shape.  Nothing has changed then.
    """
    return _load(Path(folder), begin("load_pretrained", pipe))


def load_and_tell(path: str | os.PathLike[str] | None, share: Share) -> None:
    """Load like `load_pretrained`, if there is a folder; warn of tensors without a place."""
    unknown = _load(Path(path), share) if path is not None else ()
    if unknown and share.mesh.is_first_rank:
        warnings.warn(f"{path}: {_unplaced(unknown)}", stacklevel=3)


def _load(path: Path, share: Share) -> tuple[str, ...]:
    mesh, held, shards = share
    original, owners = held.original, held.owners

    # 1. Match the folder with the model in each process; all refuse alike.
    def look() -> tuple[Folder, list[_Match], dict[str, tuple[str, Source]], list[str], set[str]]:
        folder = Folder.at(path)
        sources = Sources(original, folder.names)
        matches, missing = _match(sources, held.own_tensors(), shards)
        extra = {name: source for name in owners for source in islice(sources.of([name]), 1)}
        missing += [(name,) for name in owners if name not in extra]
        is_left_out = may_be_absent(original)
        faults = [
            f"{' = '.join(names)} is missing"
            for names in missing
            if not any(is_left_out(name) for name in names)
        ]
        used = {name for one in matches for _, source in one.sources for name in source.names}
        with folder.reading(used) as (look_at, read):  # values of what is there twice only
            faults += [fault for one in matches for fault in _misfit(one, look_at, read)]
        faults += extra_faults(owners, extra)
        used |= {name for _, source in extra.values() for name in source.names}
        return folder, matches, extra, faults, used

    (folder, matches, extra, _, used), answers = agreed(
        mesh,
        look,
        lambda seen: (seen[3], sorted(seen[4])),
        "for the others to look into the same folder",
    )
    # 2. A tensor is unknown only if no process has a place for it.
    unknown = _unknown(folder.names, (set(names) for _, names in answers), original)
    refuse_foreign(
        f"{path} is of another model:",
        (faults for faults, _ in answers),
        _unplaced(unknown) if unknown else "",
        "Build the model from the folder's own config.json. If from_pretrained loads the folder "
        "all the same, do so once, and save the model with "
        "save_pretrained(new_folder, save_original_format=False)",
    )

    # 3. Copy the values, once nothing can fail any more on any rank.
    def fill() -> dict[str, Any]:
        with folder.reading(used) as (_, read), torch.no_grad():
            _fill(matches, read)
            return {name: source.make(read)[known] for name, (known, source) in extra.items()}

    set_extra(owners, mesh.world.work(fill, "for the others to read the same folder"))
    return unknown


def _match(
    sources: Sources, tensors: Mapping[tuple[str, ...], Tensor], shards: CutWeights
) -> tuple[list[_Match], list[tuple[str, ...]]]:
    matches, missing = [], []
    for names, tensor in tensors.items():
        of_tensor = tuple(sources.of(names))
        if of_tensor:
            here = shards.slices(names[:1]).get(names[0]) or Slice.of_all(tuple(tensor.shape))
            matches.append(_Match(names[0], tensor, of_tensor, here))
        else:
            missing.append(names)
    return matches, missing


def _misfit(one: _Match, look: Read, read: Read) -> Iterator[str]:
    faults = [fault for name, source in one.sources for fault in _unlike(one, name, source, look)]
    yield from faults
    (first, source), *others = one.sources
    for name, other in others if not faults else ():
        if not torch.equal(source.make(read)[first], other.make(read)[name]):
            yield f"{first} and {name} differ, and are one tensor in the model"


def _unlike(one: _Match, name: str, source: Source, look: Read) -> Iterator[str]:
    """Yield the differences from the model: in shape, or in the kind of number."""
    try:
        made = source.make(look)[name]
    except (RuntimeError, ValueError, LookupError) as error:
        yield f"{name} cannot be made of {', '.join(source.names)}: {error}"
        return
    if made.shape != one.part.whole:
        shapes = f"{list(made.shape)}, the model's {one.name} {list(one.part.whole)}"
        yield f"{name} has the shape {shapes}"
    if _kind(made.dtype) != _kind(one.tensor.dtype):
        yield (
            f"{name} holds {_kind(made.dtype)} where the model's {one.name} holds "
            f"{_kind(one.tensor.dtype)}, as in a quantized model; give one that is not"
        )


def _kind(dtype: torch.dtype) -> str:
    if dtype is torch.uint8:
        return "packed numbers"
    if dtype.is_complex:
        return "complex numbers"
    return "numbers with a fraction" if dtype.is_floating_point else "whole numbers"


def _fill(matches: Sequence[_Match], read: Callable[..., Any]) -> None:
    """Copy the values; read each source once, and of a plain one only the slice needed here."""
    users: dict[Source, list[tuple[str, _Match]]] = {}
    for one in matches:
        name, source = one.sources[0]
        users.setdefault(source, []).append((name, one))
    for source, places in users.items():
        (name, one), *others = places
        if source.plain and not one.part.is_all and not others:
            one.tensor.copy_(source.make(partial(read, piece=one.part))[name])
            continue
        made = source.make(read)
        for name, one in places:
            one.tensor.copy_(made[name][one.part.indices])


def _unknown(
    there: Iterable[str], used: Iterable[set[str]], original: nn.Module
) -> tuple[str, ...]:
    """Return the names that no process used, except buffers and names that the class ignores."""
    names = list(there)
    buffers = Sources(original, names).of(name for name, _ in original.named_buffers())
    known = {name for _, source in buffers for name in source.names}.union(*used)
    ignored = patterns_of(original, "_keys_to_ignore_on_load_unexpected")
    return tuple(name for name in names if name not in known and not fits(name, ignored))


def _unplaced(unknown: tuple[str, ...]) -> str:
    shown = ", ".join(unknown[:5]) + (", ..." if len(unknown) > 5 else "")
    return f"{len(unknown)} tensors there have no place in the model: {shown}"
