"""A running average of the weights, by which a model is judged."""

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
    """Keeps a running average of what an optimizer moves, and of BatchNorm's running statistics.

        average <- d * average + (1 - d) * weight       d = min(decay, (1 + step) / (10 + step))

    It is part of the optimizer's state: saved and loaded with it, cut as it is cut.  The averages
    of statistics are with the weight of their layer; a layer without one has none.  Statistics
    are averaged since they are those of the weights as they were, not of averaged ones, as in the
    TPU code for AmoebaNet.  The smaller d of the first steps is TensorFlow's, so that the weights
    drawn at first do not last.
    """

    def __init__(
        self, optimizer: Optimizer, decay: float, modules: Iterable[nn.Module] = ()
    ) -> None:
        self._optimizer, self._decay, self.step = optimizer, decay, 0
        """Steps before the next one; the trainer says."""
        self._norms: dict[Tensor, nn.Module] = {
            norm.weight: norm
            for norm in modules
            if isinstance(norm, _NORMS) and norm.affine and norm.track_running_stats
        }
        optimizer.register_step_post_hook(self._note)

    @torch.no_grad()
    def _note(self, *_: Any) -> None:
        decay = min(self._decay, (1 + self.step) / (10 + self.step))
        for parameter in self._moved():
            state = self._optimizer.state[parameter]
            for key, tensor in self._averaged(parameter):
                if key in state:
                    state[key].lerp_(tensor, 1 - decay)
                else:
                    state[key] = tensor.detach().clone()

    def _moved(self) -> Iterator[Tensor]:
        for group in self._optimizer.param_groups:
            yield from (p for p in group["params"] if p.grad is not None)

    def _averaged(self, parameter: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield what has its average in the state of a parameter, each with the key there."""
        yield KEY, parameter
        if parameter in self._norms:
            for name in STATISTICS:
                yield f"{KEY}_{name}", getattr(self._norms[parameter], name)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the parameters, and the statistics, be their averages."""
        averages = {
            tensor: state[key]
            for parameter, state in self._optimizer.state.items()
            for key, tensor in self._averaged(parameter)
            if key in state
        }
        with torch.no_grad():
            kept = {tensor: tensor.detach().clone() for tensor in averages}
            _copy(averages)
            try:
                yield
            finally:
                _copy(kept)


def name_of_averaged(key: str) -> str:
    """Name the tensor whose average is saved as "<parameter name>.<state key>"; empty: none's."""
    parameter, _, state_key = key.rpartition(".")
    layer = parameter.rpartition(".")[0]
    names = {f"{KEY}_{name}": f"{layer}.{name}".lstrip(".") for name in STATISTICS}
    return {KEY: parameter, **names}.get(state_key, "")


def _copy(values: dict[Any, Tensor]) -> None:
    for tensor, value in values.items():
        tensor.copy_(value)
