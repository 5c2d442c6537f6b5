"""Each process reads the tensors that it has, and all refuse what one of them must refuse."""

import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from penstock.errors import CheckpointError
from penstock.mesh import Mesh

from .folder import Folder, Reader

_MOST_FAULTS = 100


@dataclass(frozen=True, slots=True)
class _Found:
    """Where a tensor of the model is: its names in the folder, one unless it is there twice."""

    name: str
    tensor: Tensor
    sources: tuple[str, ...]


def load(path: Path, module: nn.Module, original: nn.Module, mesh: Mesh | None) -> tuple[str, ...]:
    """Load the tensors that `module` has in this process from a folder; see `load_pretrained`.

    `original` is the model, whose class may know of other names.

    Returns:
        The names of tensors in the folder that no process has a place for.

    Raises:
        CheckpointError: the folder is none, or does not fit; nothing has changed then.
    """
    problem: str | None = None
    faults: list[str] = []
    found: list[_Found] = []
    folder = Folder(path, {})
    try:
        folder = Folder.at(path)
        found, faults = _match(folder, own_tensors(module), _Names(original))
        faults += _misfits(folder, found)
    except CheckpointError as error:
        problem = str(error)
    used = {source for one in found for source in one.sources}
    parts = [(problem, faults, used)]
    if mesh is not None:
        parts = mesh.gather(parts[0], "for the others to look into the same folder")
    if problems := [said for said, _, _ in parts if said is not None]:
        raise CheckpointError("; ".join(dict.fromkeys(problems)))
    if faults := [fault for _, said, _ in parts for fault in said]:
        unknown = _unknown(folder.files, (names for _, _, names in parts), original)
        raise CheckpointError(_foreign(path, list(dict.fromkeys(faults)), unknown))
    with folder.reading(used) as (_, read), torch.no_grad():
        for one in found:
            one.tensor.copy_(read(one.sources[0]))
    return _unknown(folder.files, (names for _, _, names in parts), original)


def load_and_tell(path: Path, module: nn.Module, original: nn.Module, mesh: Mesh | None) -> None:
    """Load like `load`; warn, on the first rank, of tensors that nobody has a place for."""
    unknown = load(path, module, original, mesh)
    if unknown and (mesh is None or mesh.is_first_rank):
        warnings.warn(f"{path}: {_unplaced(unknown)}", stacklevel=3)


def own_tensors(module: nn.Module) -> dict[tuple[str, ...], Tensor]:
    """Give the tensors of a state dict that have values in this process, each by all its names."""
    names: dict[int, list[str]] = {}
    state = module.state_dict(keep_vars=True)
    own = {n: t for n, t in state.items() if isinstance(t, Tensor) and not t.is_meta}
    for name, tensor in own.items():
        names.setdefault(id(tensor), []).append(name)
    return {tuple(alike): own[alike[0]] for alike in names.values()}


class _Names:
    """What a tensor may be called in a folder: with and without the name of the base model."""

    def __init__(self, original: nn.Module) -> None:
        base = getattr(original, "base_model_prefix", "")
        self._prefix = f"{base}." if isinstance(base, str) and base else ""

    def candidates(self, name: str) -> Iterator[str]:
        yield name
        if self._prefix:
            short = name.removeprefix(self._prefix)
            yield short if short != name else self._prefix + name


def _match(
    folder: Folder, own: Mapping[tuple[str, ...], Tensor], names: _Names
) -> tuple[list[_Found], list[str]]:
    found, faults = [], []
    for known_as, tensor in own.items():
        candidates = dict.fromkeys(c for name in known_as for c in names.candidates(name))
        sources = tuple(name for name in candidates if name in folder.files)
        if sources:
            found.append(_Found(known_as[0], tensor, sources))
        else:
            faults.append(f"{' = '.join(known_as)} is missing")
    return found, faults


def _misfits(folder: Folder, found: Iterable[_Found]) -> list[str]:
    """Say what cannot be copied, by what the files say of it; values are read only of tensors that
    are there twice.
    """
    with folder.reading(name for one in found for name in one.sources) as (look, read):
        return [fault for one in found for fault in _misfit(one, look, read)]


def _misfit(one: _Found, look: Reader, read: Reader) -> Iterator[str]:
    wanted = list(one.tensor.shape)
    shapes = {name: list(look(name).get_shape()) for name in one.sources}
    wrong = {name: shape for name, shape in shapes.items() if shape != wanted}
    for name, shape in wrong.items():
        yield f"{name} has the shape {shape}, the model's {one.name} {wanted}"
    for other in one.sources[1:] if not wrong else ():
        if not torch.equal(read(one.sources[0]), read(other)):
            yield f"{one.sources[0]} and {other} differ, and are one tensor in the model"


def _unknown(
    there: Iterable[str], used: Iterable[set[str]], original: nn.Module
) -> tuple[str, ...]:
    """Give the names that nobody used, but for buffers that are not loaded, and what the model's
    class says to ignore.
    """
    names = _Names(original)
    known = {c for name, _ in original.named_buffers() for c in names.candidates(name)}
    known = known.union(*used)
    patterns = getattr(original, "_keys_to_ignore_on_load_unexpected", None) or ()
    ignored = [re.compile(pattern) for pattern in patterns]
    left = (name for name in there if name not in known)
    return tuple(name for name in left if not any(p.search(name) for p in ignored))


def _foreign(path: Path, faults: list[str], unknown: tuple[str, ...]) -> str:
    lines = [f"{path} is of another model:"]
    lines += [f"  {fault}" for fault in faults[:_MOST_FAULTS]]
    if len(faults) > _MOST_FAULTS:
        lines.append(f"  and {len(faults) - _MOST_FAULTS} more")
    if unknown:
        lines.append(_unplaced(unknown))
    lines.append(
        "Build the model from the folder's own config.json. If from_pretrained renames or fuses "
        "tensors of this model, load it once with that and save it by "
        "save_pretrained(new_folder, save_original_format=False)"
    )
    return "\n".join(lines)


def _unplaced(unknown: tuple[str, ...]) -> str:
    shown = ", ".join(unknown[:5]) + (", ..." if len(unknown) > 5 else "")
    return f"{len(unknown)} tensors there have no place in the model: {shown}"
