"""Read a checkpoint a few tensors at a time, without a pipeline; remove checkpoints."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from .files import (
    MODEL,
    OPTIMIZER,
    UNFINISHED,
    check_files,
    digest_of_checkpoint,
    read_state,
    remove_folder,
)
from .pieces import Pieces, files_for, find_pieces, read_pieces


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
        facts, self._digests = read_state(self.path)
        self.state: dict[str, Any] = facts["state"]
        """The keyword arguments of `save_checkpoint`."""
        if facts.get("files") is None:  # of an early version: its files say what they hold
            check_files(self.path, self._digests)
            self._digests = {}
        has_optimizer = facts["optimizer"] is not None
        self._model = find_pieces(self.path, MODEL, facts)
        self._optimizer = find_pieces(self.path, OPTIMIZER, facts) if has_optimizer else {}

    @property
    def digest(self) -> str:
        """A digest of the whole checkpoint, which tells it from others."""
        return digest_of_checkpoint(self.path)

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names of the model's parameters and buffers; one of several names of a tensor."""
        return (*self._model,)

    @property
    def optimizer_names(self) -> tuple[str, ...]:
        """The names of the optimizer's tensors: "<parameter name>.<state key>"."""
        return (*self._optimizer,)

    def read_model(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Read parameters and buffers into CPU memory, whole; names that are absent are left out.

        Raises:
            CheckpointError: a file is missing or damaged.
        """
        return self._read(self._model, names)

    def read_optimizer(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Read tensors of the optimizer's state, as `read_model` reads those of the model."""
        return self._read(self._optimizer, names)

    def verify(self) -> None:
        """Prove by digest that every file is as it was written.

        Raises:
            CheckpointError: one is missing or damaged.
        """
        check_files(self.path, self._digests)
        self._digests = {}

    def _read(self, pieces: Mapping[str, Pieces], names: Iterable[str]) -> dict[str, Tensor]:
        wanted = {name: pieces[name] for name in names if name in pieces}
        files = files_for(wanted, {}) & self._digests.keys()
        check_files(self.path, {file: self._digests[file] for file in files})
        self._digests = {f: d for f, d in self._digests.items() if f not in files}
        return read_pieces(self.path, wanted)[0]


def remove_checkpoint(path: str | os.PathLike[str]) -> None:
    """Delete a checkpoint; it disappears whole, however the deletion ends."""
    remove_folder(Path(path))


def remove_unfinished(folder: str | os.PathLike[str]) -> None:
    """Delete what interrupted saves left in a folder of checkpoints, while none is under way."""
    for path in Path(folder).glob(f".*{UNFINISHED}"):
        remove_folder(path)
