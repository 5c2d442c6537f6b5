"""Tensors in the files of a checkpoint: where the pieces of each are, and reading what is wanted.

    weight 6 x 4 on three devices     files of two slices     what is wanted: rows 2 to 4

    shard-00001   rows 0, 1
    shard-00002   rows 2, 3           overlaps                rows 2, 3 of it
    shard-00003   rows 4, 5           overlaps                row 4 of it

A process reads the bytes that it keeps, however others had cut the tensor when it was written.
The header of each file says where its slices begin in the way of torch.distributed.checkpoint,
whose `HuggingFaceStorageReader` reads them too.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from torch import Tensor

from penstock.sharding.layouts import Slice

from .complex_pairs import Opened
from .files import SUFFIX, damaged

Shape = tuple[int, ...]


class Piece(NamedTuple):
    """What a file has of a tensor: a slice, or all of it, which is as long as the file says."""

    file: str
    offsets: Shape | None = None
    lengths: Shape | None = None


Pieces = tuple[Piece, ...]
Own = Mapping[str, Slice]
"""What is wanted of tensors, by name: of those that are not here, all."""


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
    """Map the tensors of what one process writes as `name` to the pieces that make each of them.

    `facts` of a checkpoint name the tensors of all files; of an early one, the files are opened.

    Raises:
        CheckpointError: a file has to be opened, and is no safetensors file.
    """
    folder, slices = name.removesuffix(SUFFIX), facts.get("slices", {})
    noted = facts.get("files")
    if noted is None:
        noted = {}
        files = sorted((path / folder).glob(f"*{SUFFIX}")) or [path / name]
        for file in (file.relative_to(path).as_posix() for file in files):
            with _opened(path, file) as opened:
                noted[file] = opened.names()
    found: dict[str, list[Piece]] = {}
    for file, names in noted.items():
        if file.startswith((f"{folder}/", name)):
            for tensor in names:
                place = map(tuple, slices.get(file, {}).get(tensor, ()))
                found.setdefault(tensor, []).append(Piece(file, *place))
    return {tensor: tuple(pieces) for tensor, pieces in found.items()}


def files_for(pieces: Mapping[str, Pieces], own: Own) -> set[str]:
    """Name the files that are opened for what is wanted."""
    return {piece.file for name, has in pieces.items() for piece in _needed(has, own.get(name))}


def _needed(pieces: Pieces, own: Slice | None) -> Pieces:
    """Leave out the pieces of which nothing is wanted, but for one that tells the type."""
    whole = _whole(pieces)
    if own is None or whole is None or whole != own.whole:
        return pieces
    return tuple(p for p in pieces if _overlap(p, own) is not None) or pieces[:1]


def _whole(pieces: Pieces) -> Shape | None:
    """Return the shape of a tensor that is in slices."""
    ends = [_ends(p.offsets, p.lengths) for p in pieces if p.offsets is not None]
    return tuple(map(max, zip(*ends, strict=True))) if ends else None


def _ends(offsets: Shape, lengths: Shape | None) -> Shape:
    assert lengths is not None
    return tuple(a + n for a, n in zip(offsets, lengths, strict=True))


def _overlap(piece: Piece, own: Slice) -> list[tuple[int, int]] | None:
    """Return where what both have begins and ends, by dimension; None: they share nothing."""
    assert piece.offsets is not None
    ends = zip(_ends(piece.offsets, piece.lengths), _ends(own.offsets, own.lengths), strict=True)
    begins = map(max, zip(piece.offsets, own.offsets, strict=True))
    both = list(zip(begins, map(min, ends), strict=True))
    return both if all(a < b for a, b in both) else None


def read_pieces(
    path: Path, pieces: Mapping[str, Pieces], own: Own | None = None
) -> tuple[dict[str, Tensor], dict[str, Shape]]:
    """Read what is `own` of each tensor, and the whole of those that have another shape than is
    thought; each file is opened once.

    Returns:
        The tensors, in CPU memory, and the whole shape of each.

    Raises:
        CheckpointError: one is no safetensors file, or lacks a tensor.
    """
    own = own or {}
    by_file: dict[str, list[tuple[str, Piece]]] = {}
    for name, has in pieces.items():
        for piece in _needed(has, own.get(name)):
            by_file.setdefault(piece.file, []).append((name, piece))
    tensors: dict[str, Tensor] = {}
    wholes: dict[str, Shape] = {}
    for file, its in by_file.items():
        with _opened(path, file) as opened:
            for name, piece in its:
                whole = _whole(pieces[name]) or opened.shape(name)
                every = Slice.of_all(whole)
                wanted = own.get(name, every)
                wanted = wanted if wanted.whole == whole else every
                tensors[name] = _read(opened, (name, piece), wanted, tensors.get(name))
                wholes[name] = whole
    return tensors, wholes


@contextmanager
def _opened(path: Path, file: str) -> Iterator[Opened]:
    try:
        with safe_open(path / file, framework="pt") as opened:
            yield Opened(opened)
    except (OSError, SafetensorError) as error:
        raise damaged(path, file, error) from None


def _read(opened: Opened, of: tuple[str, Piece], wanted: Slice, before: Tensor | None) -> Tensor:
    """Read what a file has of what is wanted, into what was read `before` of it."""
    name, piece = of
    if wanted.is_all and piece.offsets is None:
        return opened.read(name)
    shape = opened.shape(name)
    piece = Piece(piece.file, piece.offsets or (0,) * len(shape), shape)
    both = _overlap(piece, wanted)
    if both is None:  # its type only
        return opened.read(name, (slice(0, 1),) * len(shape)).new_empty(wanted.lengths)
    assert piece.offsets is not None
    found = opened.read(name, _from(both, piece.offsets))
    if found.shape == wanted.lengths:
        return found
    target = found.new_empty(wanted.lengths) if before is None else before
    target[_from(both, wanted.offsets)] = found
    return target


def _from(both: Sequence[tuple[int, int]], offsets: Shape) -> tuple[slice, ...]:
    return tuple(slice(a - o, b - o) for (a, b), o in zip(both, offsets, strict=True))
