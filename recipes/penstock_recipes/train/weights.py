"""Read the weights of checkpoints, or their averages, a few tensors at a time."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from penstock import CheckpointReader
from penstock_recipes.optim.averaging import name_of_averaged

Names = Mapping[str, str]
"""Names of tensors, each with the first name of the same tensor: see `tensor_names`."""
Weights = Iterable[tuple[str, torch.Tensor]]
"""Names and tensors, read from disk one after the other."""
_AT_ONCE = 32
"""Tensors in memory at a time."""


def tensor_names(model: nn.Module) -> dict[str, str]:
    """Map all tensor names of a whole model to the first name of the same tensor."""
    first: dict[int, str] = {}
    tensors = model.state_dict(keep_vars=True)
    return {name: first.setdefault(id(tensor), name) for name, tensor in tensors.items()}


class SavedWeights:
    """The weights of a checkpoint; a parameter with a running average is read as its average.

    A tied parameter has several names, and its average is saved under one of them.

    Raises:
        CheckpointError: it is not a checkpoint, or damaged.
    """

    def __init__(self, checkpoint: Path, names: Names) -> None:
        self._saved = CheckpointReader(checkpoint)
        averaged = {name_of_averaged(key): key for key in self._saved.optimizer_names}
        keys = {names[name]: key for name, key in averaged.items() if name in names}
        self._averages = {n: keys[first] for n, first in names.items() if first in keys}

    def read(self, wanted: Iterable[str]) -> dict[str, torch.Tensor]:
        """Read the `wanted` tensors that the checkpoint has, averaged if they have an average."""
        saved = set(self._saved.model_names)
        names = [name for name in wanted if name in saved]
        averages = self._saved.read_optimizer(
            self._averages[name] for name in names if name in self._averages
        )
        tensors = self._saved.read_model(name for name in names if name not in self._averages)
        return {
            name: tensors[name] if name in tensors else averages[self._averages[name]]
            for name in names
        }


def mean_weights(checkpoints: Sequence[Path], names: Names) -> Weights:
    """Yield the mean of each weight over the checkpoints; few are in memory at a time."""
    *before, newest = [SavedWeights(checkpoint, names) for checkpoint in checkpoints]
    listed = list(names)
    for start in range(0, len(listed), _AT_ONCE):
        tensors = newest.read(listed[start : start + _AT_ONCE])
        floats = [name for name, tensor in tensors.items() if tensor.is_floating_point()]
        totals = {name: tensors[name].to(torch.float64) for name in floats}
        for saved in reversed(before):
            for name, tensor in saved.read(floats).items():
                totals[name] += tensor
        for name, tensor in tensors.items():
            mean = totals[name] / len(checkpoints) if name in totals else tensor
            yield name, mean.to(tensor.dtype)


def fill(model: nn.Module, weights: Weights) -> None:
    """Copy weights into a model."""
    state = model.state_dict()
    with torch.no_grad():
        for name, tensor in weights:
            state[name].copy_(tensor)
