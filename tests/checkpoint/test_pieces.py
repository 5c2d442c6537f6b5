"""Tensors in slices: whoever reads them gets what it wants, whoever wrote them."""

import random
from collections.abc import Iterator
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader, load

from penstock.checkpoint.reader import Own, files_for, find_pieces, header_of, read_pieces
from penstock.sharding.layouts import Shape, Slice


def cut(shape: Shape, drawn: random.Random) -> Iterator[Slice]:
    """Cut a shape into a grid, unevenly."""
    ends = []
    for length in shape:
        count = drawn.randint(1, min(3, length))
        ends.append([0, *sorted(drawn.sample(range(1, length), count - 1)), length])
    for box in product(*map(pairwise, ends)):
        yield Slice(tuple(a for a, _ in box), tuple(b - a for a, b in box), shape)


def some(shape: Shape, drawn: random.Random) -> Slice:
    """Draw a slice, mayhap an empty one."""
    begins = tuple(drawn.randint(0, length) for length in shape)
    lengths = tuple(drawn.randint(0, n - a) for n, a in zip(shape, begins, strict=True))
    return Slice(begins, lengths, shape)


def write(folder: Path, tensors: dict[str, Tensor], drawn: random.Random) -> dict[str, Any]:
    """Write tensors as several processes do; return the facts of the checkpoint."""
    (folder / "model").mkdir(parents=True)
    files: list[dict[str, Slice]] = [{} for _ in range(8)]
    for name, tensor in tensors.items():
        for place, own in zip(drawn.sample(files, 8), cut_few(tensor, drawn), strict=False):
            place[name] = own
    facts: dict[str, Any] = {"files": {}, "slices": {}}
    for number, held in enumerate(files):
        if not held:
            continue
        file = f"model/{number}.safetensors"
        parts = {name: tensors[name][part.indices].contiguous() for name, part in held.items()}
        slices: Own = {name: part for name, part in held.items() if not part.is_all}
        save_file(parts, folder / file, header_of(parts, slices))
        facts["files"][file] = list(parts)
        facts["slices"][file] = {
            name: [[*part.offsets], [*part.lengths]] for name, part in slices.items()
        }
    return facts


def cut_few(tensor: Tensor, drawn: random.Random) -> list[Slice]:
    """Cut a tensor into at most eight."""
    while len(found := list(cut(tuple(tensor.shape), drawn))) > 8:
        pass
    return found


@pytest.mark.parametrize("seed", range(40))
def test_a_slice_is_read_whatever_slices_were_written(seed: int, tmp_path: Path) -> None:
    drawn = random.Random(seed)
    shapes = [tuple(drawn.randint(1, 6) for _ in range(drawn.randint(0, 3))) for _ in range(5)]
    tensors = {f"t{n}": torch.rand(shape, dtype=torch.float64) for n, shape in enumerate(shapes)}
    facts = write(tmp_path, tensors, drawn)
    pieces = find_pieces(tmp_path, "model.safetensors", facts)
    own = {
        name: some(tuple(tensor.shape), drawn) for name, tensor in tensors.items() if tensor.ndim
    }
    found, wholes = read_pieces(tmp_path, pieces, own)
    for name, tensor in tensors.items():
        wanted = tensor[own[name].indices] if name in own else tensor
        assert torch.equal(found[name], wanted) and found[name].dtype == wanted.dtype
        assert wholes[name] == tensor.shape
    everything, _ = read_pieces(tmp_path, pieces)
    assert all(torch.equal(everything[name], tensor) for name, tensor in tensors.items())


def test_only_files_with_something_of_a_slice_are_opened(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    whole = torch.arange(24.0).reshape(6, 4)
    facts: dict[str, Any] = {"files": {}, "slices": {}}
    for number in range(3):
        file, own = f"model/{number}.safetensors", Slice((2 * number, 0), (2, 4), (6, 4))
        parts = {"weight": whole[own.indices]}
        save_file(parts, tmp_path / file, header_of(parts, {"weight": own}))
        facts["files"][file], facts["slices"][file] = ["weight"], {"weight": [*own[:2]]}
    pieces = find_pieces(tmp_path, "model.safetensors", facts)
    rows = {"weight": Slice((2, 0), (3, 4), (6, 4))}
    assert files_for(pieces, rows) == {"model/1.safetensors", "model/2.safetensors"}
    (tmp_path / "model/0.safetensors").unlink()
    found, _ = read_pieces(tmp_path, pieces, rows)
    assert torch.equal(found["weight"], whole[2:5])
    other = {"weight": Slice((0, 0), (3, 2), (6, 2))}  # of another model
    assert len(files_for(pieces, other)) == 3


def test_a_slice_is_read_of_a_tensor_that_one_file_holds_whole_and_others_in_slices(
    tmp_path: Path,
) -> None:
    """As of a tied weight that one stage has in shards, and another one whole."""
    (tmp_path / "model").mkdir()
    whole = torch.arange(24.0).reshape(6, 4)
    files = [f"model/{number}.safetensors" for number in range(3)]
    own = [Slice((start, 0), (3, 4), (6, 4)) for start in (0, 3)]
    facts: dict[str, Any] = {"files": {file: ["weight"] for file in files}, "slices": {}}
    for file, part in zip(files, (*own, Slice.of_all((6, 4))), strict=True):
        save_file({"weight": whole[part.indices]}, tmp_path / file)
        if not part.is_all:
            facts["slices"][file] = {"weight": [*part[:2]]}
    pieces = find_pieces(tmp_path, "model.safetensors", facts)
    found, wholes = read_pieces(tmp_path, pieces, {"weight": Slice((2, 1), (2, 2), (6, 4))})
    assert torch.equal(found["weight"], whole[2:4, 1:3])
    assert wholes == {"weight": (6, 4)}
    assert torch.equal(read_pieces(tmp_path, pieces)[0]["weight"], whole)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_reads_the_slices_too(tmp_path: Path) -> None:
    tensors = {"a": torch.rand(5, 4), "b": torch.rand(7)}
    write(tmp_path, tensors, random.Random(3))
    read = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    reader = HuggingFaceStorageReader(str(tmp_path / "model"))
    load(read, storage_reader=reader, no_dist=True)
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())
