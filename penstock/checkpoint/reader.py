"""Read a checkpoint a few tensors at a time, without a pipeline; remove checkpoints."""

import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from .files import EXTRA, MODEL, OPTIMIZER, STATE, UNFINISHED, check_files, digest_of, read_state
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


def remove_checkpoint(path: str | os.PathLike[str]) -> None:
    """Delete a checkpoint; it disappears whole, however the deletion ends."""
    path = Path(path)
    doomed = path.with_name(f".{path.name}{UNFINISHED}")
    shutil.rmtree(doomed, ignore_errors=True)
    path.rename(doomed)
    shutil.rmtree(doomed)


def remove_unfinished(folder: str | os.PathLike[str]) -> None:
    """Delete the remains of interrupted saves in a folder; no save may be under way there."""
    for path in Path(folder).glob(f".*{UNFINISHED}"):
        remove_checkpoint(path)
