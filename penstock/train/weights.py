"""The weights in checkpoints, read a few at a time: their averages where such are kept."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from penstock.checkpoint.files import MODEL, OPTIMIZER, files_by_tensor, read_facts, read_some

from .averaging import name_of_averaged

Names = Mapping[str, str]
"""Names of tensors, each with the first name of the same tensor: see `tensor_names`."""
Weights = Iterable[tuple[str, torch.Tensor]]
_AT_ONCE = 32


def tensor_names(model: nn.Module) -> dict[str, str]:
    """Give all names of a whole model's tensors, each with the first name of the same tensor."""
    first: dict[int, str] = {}
    state = model.state_dict(keep_vars=True)
    return {name: first.setdefault(id(tensor), name) for name, tensor in state.items()}


def saved_weights(
    checkpoint: Path, names: Names, wanted: Collection[str]
) -> dict[str, torch.Tensor]:
    """Read the `wanted` tensors of a checkpoint; the average of each that has one.

    A parameter of several names has its average under one of them: it is that of all.
    """
    facts = read_facts(checkpoint)
    found = read_some(checkpoint, MODEL, wanted)
    if facts["optimizer"] is None:
        return found
    kept = {
        names[name]: key
        for key in files_by_tensor(checkpoint, OPTIMIZER)
        if (name := name_of_averaged(key)) in names
    }
    averaged = {name: kept[names[name]] for name in found if names[name] in kept}
    averages = read_some(checkpoint, OPTIMIZER, set(averaged.values()))
    return {**found, **{name: averages[key] for name, key in averaged.items()}}


def mean_weights(checkpoints: Sequence[Path], names: Names) -> Weights:
    """Yield the mean of each weight over several checkpoints; of one, its weights.

    Few are in memory at a time.
    """
    every = list(names)
    for start in range(0, len(every), _AT_ONCE):
        wanted = every[start : start + _AT_ONCE]
        newest = saved_weights(checkpoints[-1], names, wanted)
        floats = [name for name in wanted if newest[name].is_floating_point()]
        totals = {name: newest[name].to(torch.float64) for name in floats}
        for checkpoint in reversed(checkpoints[:-1]):
            for name, tensor in saved_weights(checkpoint, names, floats).items():
                totals[name] += tensor
        for name, tensor in newest.items():
            mean = totals[name] / len(checkpoints) if name in totals else tensor
            yield name, mean.to(tensor.dtype)


def fill(model: nn.Module, weights: Weights) -> None:
    """Put weights into a model."""
    own = model.state_dict()
    with torch.no_grad():
        for name, tensor in weights:
            own[name].copy_(tensor)
