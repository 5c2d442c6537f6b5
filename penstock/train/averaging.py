"""A running average of the weights, by which a model is judged."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

KEY = "average"


class Averaging:
    """Keeps a running average of what an optimizer moves.

        average <- d * average + (1 - d) * weight       d = min(decay, (1 + step) / (10 + step))

    It is part of the optimizer's state: saved and loaded with it, cut as it is cut.  The smaller
    d of the first steps is TensorFlow's, so that the weights drawn at first do not last.
    """

    def __init__(self, optimizer: Optimizer, decay: float) -> None:
        self._optimizer, self._decay, self.step = optimizer, decay, 0
        """Steps before the next one; the trainer says."""
        optimizer.register_step_post_hook(self._note)

    @torch.no_grad()
    def _note(self, *_: Any) -> None:
        decay = min(self._decay, (1 + self.step) / (10 + self.step))
        for parameter in self._moved():
            state = self._optimizer.state[parameter]
            if KEY in state:
                state[KEY].lerp_(parameter, 1 - decay)
            else:
                state[KEY] = parameter.detach().clone()

    def _moved(self) -> Iterator[Tensor]:
        for group in self._optimizer.param_groups:
            yield from (p for p in group["params"] if p.grad is not None)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the parameters be their averages."""
        averages = {
            parameter: state[KEY]
            for parameter, state in self._optimizer.state.items()
            if KEY in state
        }
        with torch.no_grad():
            kept = {parameter: parameter.detach().clone() for parameter in averages}
            _copy(averages)
            try:
                yield
            finally:
                _copy(kept)


def _copy(values: dict[Any, Tensor]) -> None:
    for parameter, value in values.items():
        parameter.copy_(value)
