"""Read a checkpoint: find the pieces of each tensor in its files, and read the wanted slices.

    weight 6 x 4 on three devices     files of two slices     wanted: rows 2 to 4

    shard-00001   rows 0, 1
    shard-00002   rows 2, 3           overlaps                rows 2, 3 of it
    shard-00003   rows 4, 5           overlaps                row 4 of it

A process reads only the bytes that it keeps, however the tensor was cut when it was written.
The header of each file says where its slices begin in the way of torch.distributed.checkpoint,
whose `HuggingFaceStorageReader` reads them too.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
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

from .files import (
    EXTRA,
    MODEL,
    OPTIMIZER,
    STATE,
    SUFFIX,
    check_files,
    damaged,
    digest_of,
    read_state,
)

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


class CheckpointReader:
    """The tensors and the state of a checkpoint, whichever processes wrote it.

        saved = penstock.CheckpointReader("checkpoints/step-000100")
        saved.state["position"]
        saved.read_model(["head.weight"])

    Each file is verified by its digest before the first tensor of it is read.

    Args:
        path: the folder that `save_checkpoint` wrote.

    Raises:
        CheckpointError: it is no checkpoint, or damaged.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.facts, self._digests = read_state(self.path)
        self._verified: set[str] = set()
        state_digest = digest_of([self.facts, self._digests])
        self.digest = digest_of({**self._digests, STATE: state_digest})
        """A digest of the whole checkpoint, which tells it from others."""
        self.state: dict[str, Any] = self.facts["state"]
        """The keyword arguments of `save_checkpoint`."""
        self.extra: dict[str, Any] = self.facts.get(EXTRA, {})
        """Extra state of modules that is no tensor."""
        if self.facts.get("files") is None:  # of an early version: its files say what they hold
            self.verify()
        has_optimizer = self.facts["optimizer"] is not None
        self.model = find_pieces(self.path, MODEL, self.facts)
        self.optimizer = find_pieces(self.path, OPTIMIZER, self.facts) if has_optimizer else {}

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names of the model's parameters and buffers; one of several names of a tensor."""
        return (*self.model,)

    @property
    def optimizer_names(self) -> tuple[str, ...]:
        """The names of the optimizer's tensors: "<parameter name>.<state key>"."""
        return (*self.optimizer,)

    def read_model(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Read parameters and buffers into CPU memory, whole; names that are absent are left out.

        Raises:
            CheckpointError: a file is missing or damaged.
        """
        return self._read(self.model, names)

    def read_optimizer(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Read tensors of the optimizer's state, as `read_model` reads those of the model."""
        return self._read(self.optimizer, names)

    def verify(self, files: Iterable[str] | None = None) -> None:
        """Prove by digest that every file, or each of `files`, is as it was written.

        Raises:
            CheckpointError: one is missing or damaged.
        """
        doubted = sorted(set(self._digests if files is None else files) - self._verified)
        check_files(self.path, {file: self._digests.get(file, "") for file in doubted})
        self._verified.update(doubted)

    def _read(self, pieces: Mapping[str, Pieces], names: Iterable[str]) -> dict[str, Tensor]:
        wanted = {name: pieces[name] for name in names if name in pieces}
        self.verify(files_for(wanted, {}))
        return read_pieces(self.path, wanted)[0]


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
