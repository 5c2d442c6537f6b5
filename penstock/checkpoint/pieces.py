"""Find the pieces of each tensor in the files of a checkpoint, and read the wanted slices.

    weight 6 x 4 on three devices     files of two slices     wanted: rows 2 to 4

    shard-00001   rows 0, 1
    shard-00002   rows 2, 3           overlaps                rows 2, 3 of it
    shard-00003   rows 4, 5           overlaps                row 4 of it

A process reads only the bytes that it keeps, however the tensor was cut when it was written.
The header of each file says where its slices begin in the way of torch.distributed.checkpoint,
whose `HuggingFaceStorageReader` reads them too.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from operator import add, sub
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from penstock.errors import CheckpointError
from penstock.sharding.layouts import Slice

from .files import SUFFIX, damaged

_PAIRS = "complex128"
"""The key in a file's header of the names of tensors that are stored as pairs."""
Shape = tuple[int, ...]


class Piece(NamedTuple):
    """A tensor in a file: a slice of it, or all, whose shape the file knows."""

    file: str
    part: Slice | None = None


Pieces = tuple[Piece, ...]
Own = Mapping[str, Slice]
"""The wanted slices by name of the tensor; tensors without an entry are wanted whole."""


def save_tensors(tensors: Mapping[str, Tensor], file: Path, header: Mapping[str, str]) -> None:
    """Write a file of contiguous tensors; their memory is read, not copied."""
    pairs = [name for name, tensor in tensors.items() if tensor.dtype is torch.complex128]
    stored = {**tensors, **{name: torch.view_as_real(tensors[name]) for name in pairs}}
    save_file(stored, file, {**header, **({_PAIRS: json.dumps(pairs)} if pairs else {})})


def header_of(tensors: Mapping[str, Tensor], slices: Own) -> dict[str, str]:
    """Return the metadata of a file that holds slices of some tensors, and others whole."""
    offsets = {
        name: {
            "saved_offsets": list(slices[name].offsets) if name in slices else [0] * tensor.ndim
        }
        for name, tensor in tensors.items()
    }
    return {"DCP_SHARDING_INFO": json.dumps(offsets), "DCP_VERSION": "1.0", "format": "pt"}


def find_pieces(path: Path, name: str, facts: Mapping[str, Any]) -> dict[str, Pieces]:
    """Map each tensor of the files called `name`, the model's or the optimizer's, to its pieces.

    `facts` of a checkpoint name the tensors of all files; of an early one, the files are opened.
    """
    folder, slices = name.removesuffix(SUFFIX), facts.get("slices", {})
    noted = facts.get("files")
    if noted is None:
        noted = {}
        files = sorted((path / folder).glob(f"*{SUFFIX}")) or [path / name]
        for file in (file.relative_to(path).as_posix() for file in files):
            with _opened(path, file) as opened:
                noted[file] = opened.names()
    places_of: dict[str, dict[str, Any]] = {}
    for file, names in noted.items():
        if file.startswith((f"{folder}/", name)):
            for tensor in names:
                places_of.setdefault(tensor, {})[file] = slices.get(file, {}).get(tensor)
    return {tensor: _pieces_of(places) for tensor, places in places_of.items()}


def _pieces_of(places: Mapping[str, Any]) -> Pieces:
    """Return the pieces of a tensor; `places` say where slices begin, and their lengths."""
    ends = [map(add, *place) for place in places.values() if place]
    if not ends:
        return tuple(map(Piece, places))
    whole = tuple(map(max, zip(*ends, strict=True)))
    boxes = [place or ((0,) * len(whole), whole) for place in places.values()]
    parts = [Slice(tuple(begin), tuple(lengths), whole) for begin, lengths in boxes]
    return tuple(map(Piece, places, parts))


def files_for(pieces: Mapping[str, Pieces], slices: Own) -> set[str]:
    """Return the files that must be opened for these slices."""
    return {piece.file for name, has in pieces.items() for piece in _needed(has, slices.get(name))}


def _needed(pieces: Pieces, wanted: Slice | None) -> Pieces:
    """Return the pieces that overlap the wanted slice; at least one, which tells the dtype."""
    part = pieces[0].part
    if wanted is None or part is None or part.whole != wanted.whole:
        return pieces
    return tuple(p for p in pieces if p.part and _common(p.part, wanted)) or pieces[:1]


def _common(one: Slice, other: Slice) -> Slice | None:
    begins = tuple(map(max, one.offsets, other.offsets))
    ends = (tuple(map(add, *part[:2])) for part in (one, other))
    lengths = tuple(map(sub, map(min, *ends), begins))
    return Slice(begins, lengths, one.whole) if all(n > 0 for n in lengths) else None


def read_pieces(
    path: Path, pieces: Mapping[str, Pieces], slices: Own | None = None
) -> tuple[dict[str, Tensor], dict[str, Shape]]:
    """Read the `slices` of tensors, others whole, into CPU memory, and the whole shapes; open each
    file once.  A file that is no safetensors file, or lacks a tensor, is a CheckpointError.
    """
    slices = slices or {}
    # Group by file; a slice may have pieces in several.
    by_file: dict[str, list[tuple[str, Piece]]] = {}
    for name, has in pieces.items():
        for piece in _needed(has, slices.get(name)):
            by_file.setdefault(piece.file, []).append((name, piece))
    tensors: dict[str, Tensor] = {}
    wholes: dict[str, Shape] = {}
    for file, its in by_file.items():
        with _opened(path, file) as opened:
            for name, piece in its:
                # A tensor of another shape than expected is read whole: the caller reports it.
                part = piece.part or Slice.of_all(opened.shape(name))
                whole = Slice.of_all(part.whole)
                wanted = slices.get(name, whole)
                wanted = wanted if wanted.whole == part.whole else whole
                tensors[name] = _read(opened, (name, part), wanted, tensors.get(name))
                wholes[name] = part.whole
    return tensors, wholes


class Opened:
    """A file that was opened by safetensors, with the tensors in it as they were saved.

    safetensors has no complex numbers of 128 bits.  They are stored as pairs of float64 of shape
    (..., n, 2), which the header of the file names.
    """

    def __init__(self, file: Any) -> None:
        self._file = file
        self._pairs = set(json.loads((file.metadata() or {}).get(_PAIRS, "[]")))

    def names(self) -> list[str]:
        return list(self._file.keys())

    def shape(self, name: str) -> tuple[int, ...]:
        stored = tuple(self._file.get_slice(name).get_shape())
        return stored[:-1] if name in self._pairs else stored

    def read(self, name: str, places: tuple[slice, ...] | None = None) -> Tensor:
        file, is_whole = self._file, places is None
        stored: Tensor = file.get_tensor(name) if is_whole else file.get_slice(name)[places]
        if name not in self._pairs:
            return stored
        # Copied: kernels want complex numbers aligned, and in a file they may lie anywhere.
        return torch.view_as_complex(stored.clone(memory_format=torch.contiguous_format))


@contextmanager
def _opened(path: Path, file: str) -> Iterator[Opened]:
    try:
        with safe_open(path / file, framework="pt") as opened:
            yield Opened(opened)
    except (OSError, SafetensorError) as error:
        raise damaged(path, file, error) from None


def _read(
    opened: Opened, stored: tuple[str, Slice], wanted: Slice, before: Tensor | None
) -> Tensor:
    """Read the part of the `wanted` slice that is in one file, into `before` if that is there."""
    name, part = stored
    if wanted == part:
        return opened.read(name)
    both = _common(part, wanted)
    if both is None:  # its type only
        return opened.read(name, (slice(0, 1),) * len(part.whole)).new_empty(wanted.lengths)
    values = opened.read(name, _within(both, part))
    if values.shape == wanted.lengths:
        return values
    target = values.new_empty(wanted.lengths) if before is None else before
    target[_within(both, wanted)] = values
    return target


def _within(part: Slice, larger: Slice) -> tuple[slice, ...]:
    return part._replace(offsets=tuple(map(sub, part.offsets, larger.offsets))).indices


def refuse_wide(tensors: Mapping[str, Tensor]) -> None:
    """Raise a CheckpointError for complex128: other libraries would read pairs of numbers."""
    for name, tensor in tensors.items():
        if tensor.dtype is torch.complex128:
            raise CheckpointError(
                f"{name!r} is complex128, a type that safetensors files do not have; use "
                "penstock.save_checkpoint and load_checkpoint, or convert it to complex64"
            )
