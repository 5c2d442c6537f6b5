"""The weights in checkpoints, read a few at a time: their averages where such are kept."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from penstock import CheckpointReader
from penstock_recipes.optim.averaging import name_of_averaged

Names = Mapping[str, str]
"""Names of tensors, each with the first name of the same tensor: see `tensor_names`."""
Weights = Iterable[tuple[str, torch.Tensor]]
_AT_ONCE = 32


def tensor_names(model: nn.Module) -> dict[str, str]:
    """Return all names of a whole model's tensors, each with the first name of the same tensor."""
    first: dict[int, str] = {}
    tensors = model.state_dict(keep_vars=True)
    return {name: first.setdefault(id(tensor), name) for name, tensor in tensors.items()}


class SavedWeights:
    """The weights of a checkpoint: the average of each that has one.

    A parameter of several names has its average under one of them: it is that of all.

    Raises:
        CheckpointError: it is no checkpoint, or damaged.
    """

    def __init__(self, checkpoint: Path, names: Names) -> None:
        self._saved = CheckpointReader(checkpoint)
        averaged = {name_of_averaged(key): key for key in self._saved.optimizer_names}
        keys = {names[name]: key for name, key in averaged.items() if name in names}
        self._averages = {n: keys[first] for n, first in names.items() if first in keys}

    def read(self, wanted: Iterable[str]) -> dict[str, torch.Tensor]:
        """Read those of the `wanted` tensors that are there; the average of each that has one."""
        found = set(self._saved.model_names)
        names = [name for name in wanted if name in found]
        averages = self._saved.read_optimizer(
            self._averages[name] for name in names if name in self._averages
        )
        tensors = self._saved.read_model(name for name in names if name not in self._averages)
        return {
            name: tensors[name] if name in tensors else averages[self._averages[name]]
            for name in names
        }


def mean_weights(checkpoints: Sequence[Path], names: Names) -> Weights:
    """Yield the mean of each weight over several checkpoints; of one, its weights.

    Few are in memory at a time.
    """
    *before, newest = [SavedWeights(checkpoint, names) for checkpoint in checkpoints]
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
