"""Complex numbers of 128 bits in safetensors files, which have no such type.

    complex128 of shape (..., n)  ──►  float64 of shape (..., n, 2): real and imaginary part

The header of a file names the tensors that are stored so.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from penstock.errors import CheckpointError

_PAIRS = "complex128"


def save_tensors(
    tensors: Mapping[str, Tensor], file: Path, header: Mapping[str, str] | None = None
) -> None:
    """Write a file of contiguous tensors; their memory is read, not copied."""
    pairs = [name for name, tensor in tensors.items() if tensor.dtype is torch.complex128]
    stored = {**tensors, **{name: torch.view_as_real(tensors[name]) for name in pairs}}
    noted = {**(header or {}), **({_PAIRS: json.dumps(pairs)} if pairs else {})}
    save_file(stored, file, noted or None)


class Opened:
    """A file that was opened by safetensors, with the tensors in it as they were saved."""

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


def refuse_wide(tensors: Mapping[str, Tensor]) -> None:
    """Raise a CheckpointError for complex128: other libraries would read pairs of numbers."""
    for name, tensor in tensors.items():
        if tensor.dtype is torch.complex128:
            raise CheckpointError(
                f"{name!r} is complex128, a type that safetensors files do not have; use "
                "penstock.save_checkpoint and load_checkpoint, or convert it to complex64"
            )
