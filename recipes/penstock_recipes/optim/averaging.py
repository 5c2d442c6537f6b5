"""A running average of the weights, for evaluation."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

KEY = "average"
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
STATISTICS = ("running_mean", "running_var")


class Averaging:
    """Keeps a running average of an optimizer's weights, and of BatchNorm's running statistics.

        average <- d * average + (1 - d) * weight       d = min(decay, (1 + step) / (10 + step))

    The averages are part of the optimizer's state: saved, loaded and sharded with it.  The
    average of a BatchNorm's statistics is stored with the weight of that layer, and a layer
    without a weight has none.  Averaging the statistics follows the TPU code for AmoebaNet.  The
    smaller d of the first steps is TensorFlow's; it makes the average forget the initial weights.
    """

    def __init__(
        self, optimizer: Optimizer, decay: float, modules: Iterable[nn.Module] = ()
    ) -> None:
        self._optimizer, self._decay, self.step = optimizer, decay, 0
        """Number of steps done; the trainer sets it."""
        self._norms: dict[Tensor, nn.Module] = {
            norm.weight: norm
            for norm in modules
            if isinstance(norm, _NORMS) and norm.affine and norm.track_running_stats
        }
        optimizer.register_step_post_hook(self._note)

    @torch.no_grad()
    def _note(self, *_: Any) -> None:
        decay = min(self._decay, (1 + self.step) / (10 + self.step))
        groups = self._optimizer.param_groups
        updated = [p for group in groups for p in group["params"] if p.grad is not None]
        for parameter in updated:
            state = self._optimizer.state[parameter]
            for key, tensor in self._averaged(parameter):
                if key in state:
                    state[key].lerp_(tensor, 1 - decay)
                else:
                    state[key] = tensor.detach().clone()

    def _averaged(self, parameter: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that are averaged in the state of a parameter, with their keys."""
        yield KEY, parameter
        if parameter in self._norms:
            for name in STATISTICS:
                yield f"{KEY}_{name}", getattr(self._norms[parameter], name)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Replace the parameters and the statistics by their averages inside the context."""
        averages = {
            tensor: state[key]
            for parameter, state in self._optimizer.state.items()
            for key, tensor in self._averaged(parameter)
            if key in state
        }
        with torch.no_grad():
            newest = {tensor: tensor.detach().clone() for tensor in averages}
            _copy(averages)
            try:
                yield
            finally:
                _copy(newest)


def name_of_averaged(key: str) -> str:
    """Return the tensor whose average is saved as "<parameter>.<state key>"; empty if none."""
    parameter, _, state_key = key.rpartition(".")
    layer = parameter.rpartition(".")[0]
    names = {f"{KEY}_{name}": f"{layer}.{name}".lstrip(".") for name in STATISTICS}
    return {KEY: parameter, **names}.get(state_key, "")


def _copy(values: dict[Any, Tensor]) -> None:
    for tensor, value in values.items():
        tensor.copy_(value)
