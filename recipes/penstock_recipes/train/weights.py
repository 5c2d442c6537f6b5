"""The weights in checkpoints, read a few at a time: their averages where such are kept."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from penstock.checkpoint.files import (
    MODEL,
    OPTIMIZER,
    check_files,
    read_state,
)
from penstock.checkpoint.pieces import Pieces, files_for, find_pieces, read_pieces
from penstock.model.state import first_names
from penstock_recipes.optim.averaging import name_of_averaged

Names = Mapping[str, str]
"""Names of tensors, each with the first name of the same tensor: see `tensor_names`."""
Weights = Iterable[tuple[str, torch.Tensor]]
_AT_ONCE = 32


def tensor_names(model: nn.Module) -> dict[str, str]:
    """Return all names of a whole model's tensors, each with the first name of the same tensor."""
    return first_names(model.state_dict(keep_vars=True).items())


@dataclass(frozen=True, slots=True)
class SavedWeights:
    """Where a checkpoint has its weights, in files that are verified.

    `of_model` gives the pieces of each, and `averages` the name of its average, where it has one,
    and the pieces of that.
    """

    checkpoint: Path
    of_model: Mapping[str, Pieces]
    averages: Mapping[str, tuple[str, Pieces]]

    @classmethod
    def find(
        cls, checkpoint: Path, names: Names, wanted: Iterable[str] | None = None
    ) -> "SavedWeights":
        """Find the `wanted` tensors, or all, and verify the files that hold them, each once.

        A parameter of several names has its average under one of them: it is that of all.

        Raises:
            CheckpointError: it is no checkpoint, or damaged.
        """
        facts, digests = read_state(checkpoint)
        noted = facts.get("files")
        if noted is None:
            check_files(checkpoint, digests)  # before they are asked what they hold
        there = find_pieces(checkpoint, MODEL, facts)
        of_model = {n: there[n] for n in (names if wanted is None else wanted) if n in there}
        averages = {}
        if facts["optimizer"] is not None:
            kept = {
                names[name]: (key, pieces)
                for key, pieces in find_pieces(checkpoint, OPTIMIZER, facts).items()
                if (name := name_of_averaged(key)) in names
            }
            averages = {name: kept[names[name]] for name in of_model if names[name] in kept}
        if noted is not None:
            needed = files_for(of_model, {}) | files_for(dict(averages.values()), {})
            check_files(checkpoint, {file: digests.get(file, "") for file in needed})
        return cls(checkpoint, of_model, averages)

    def read(self, wanted: Iterable[str]) -> dict[str, torch.Tensor]:
        """Read those of the `wanted` tensors that are there; the average of each that has one."""
        found = {name: self.of_model[name] for name in wanted if name in self.of_model}
        keys = {name: self.averages[name] for name in found if name in self.averages}
        plain = {name: pieces for name, pieces in found.items() if name not in keys}
        tensors, _ = read_pieces(self.checkpoint, plain)
        averages, _ = read_pieces(self.checkpoint, dict(keys.values()))
        return {n: averages[keys[n][0]] if n in keys else tensors[n] for n in found}


def mean_weights(checkpoints: Sequence[Path], names: Names) -> Weights:
    """Yield the mean of each weight over several checkpoints; of one, its weights.

    Few are in memory at a time.
    """
    *before, newest = [SavedWeights.find(checkpoint, names) for checkpoint in checkpoints]
    every = list(names)
    for start in range(0, len(every), _AT_ONCE):
        found = newest.read(every[start : start + _AT_ONCE])
        floats = [name for name, tensor in found.items() if tensor.is_floating_point()]
        totals = {name: found[name].to(torch.float64) for name in floats}
        for saved in reversed(before):
            for name, tensor in saved.read(floats).items():
                totals[name] += tensor
        for name, tensor in found.items():
            mean = totals[name] / len(checkpoints) if name in totals else tensor
            yield name, mean.to(tensor.dtype)


def fill(model: nn.Module, weights: Weights) -> None:
    """Put weights into a model."""
    own = model.state_dict()
    with torch.no_grad():
        for name, tensor in weights:
            own[name].copy_(tensor)
