"""Training with weights that lag, in plain torch: what an asynchronous schedule must equal bit by
bit.  No Penstock code, no schedule: micro-batch after micro-batch, each forward and its backward
with the weights that a formula says.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from typing import Any

import torch
from torch import Tensor, nn

from tests.reference import Loss, Unsplit, pooled_batch_norm, split

Version = Callable[[int, int], int]
"""(stage, micro-batch, counted on over all mini-batches) -> how many updates it has seen."""
Values = list[Tensor]
"""Of the parameters of one stage."""


def two_versions(num_microbatches: int) -> Version:
    """Narayanan et al. 2021, section 3.1: mini-batch t sees the weights after t - 1 updates."""
    return lambda stage, i: max(i // num_microbatches - 1, 0)


def stashed(num_stages: int) -> Version:
    """Narayanan et al. 2019, section 3.3: stage s (the first is 0) lags by n - s - 1 updates."""
    return lambda stage, i: max(i - (num_stages - stage - 1), 0)


def synchronised(num_stages: int) -> Version:
    """The same with vertical sync: all stages lag by n - 1 updates."""
    return lambda stage, i: max(i - (num_stages - 1), 0)


@dataclass(slots=True)
class Delayed:
    """Trains the unsplit model; the modules of a stage see weights of one version together.

    The weights move after each mini-batch, or with `per_microbatch` after each micro-batch, whose
    loss then weighs as a mini-batch of its own.
    """

    unsplit: Unsplit
    loss: Loss
    optimizer: torch.optim.Optimizer
    stages: Sequence[Sequence[nn.Module]]
    version: Version
    per_microbatch: bool
    history: list[list[Values]] = field(default_factory=list)
    number: int = 0

    def train(
        self, batches: Sequence[tuple[Any, Any]], after_batch: Callable[[], object] | None
    ) -> Tensor:
        """Train on mini-batches, with no delay at first; give the loss of each."""
        self.number, self.history = 0, []
        self._note_version()
        found = []
        for inputs, targets in batches:
            found.append(self._train_on(inputs, targets))
            self.unsplit.step += 1
            if after_batch is not None:
                after_batch()
        return torch.stack(found)

    def _train_on(self, inputs: Any, targets: Any) -> Tensor:
        pieces, sizes = split(inputs, self.unsplit.num_microbatches)
        wanted, _ = split(targets, self.unsplit.num_microbatches)
        weights, losses = self.unsplit.weigh(wanted, sizes), []
        together = 1 if self.per_microbatch else len(pieces)
        for first in range(0, len(pieces), together):
            with pooled_batch_norm(self.unsplit.modules):
                for i in range(first, first + together):
                    weight = 1.0 if self.per_microbatch else weights[i]
                    of_batch = weights[i] if self.per_microbatch else 1.0
                    losses.append(self._add_gradients(pieces[i], wanted[i], i, weight) * of_batch)
            self._update()
        return reduce(add, losses)

    def _add_gradients(self, piece: Any, target: Any, microbatch: int, weight: float) -> Tensor:
        numbers = [self.version(stage, self.number) for stage in range(len(self.stages))]
        self._set([self.history[number][stage] for stage, number in enumerate(numbers)])
        self.number += 1
        weighted = self.loss(self.unsplit.run(piece, microbatch), target) * weight
        with torch.autocast("cpu", enabled=False):
            weighted.backward()
        return weighted.detach()

    def _update(self) -> None:
        self._set(self.history[-1])
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._note_version()

    def _note_version(self) -> None:
        self.history.append([[p.detach().clone() for p in _of(s)] for s in self.stages])

    def _set(self, values: Sequence[Values]) -> None:
        torch.clear_autocast_cache()  # which knows nothing of changes
        with torch.no_grad():
            for modules, of_stage in zip(self.stages, values, strict=True):
                for parameter, value in zip(_of(modules), of_stage, strict=True):
                    parameter.copy_(value)


def _of(modules: Sequence[nn.Module]) -> list[Tensor]:
    return [p for module in modules for p in module.parameters()]
