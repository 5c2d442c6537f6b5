"""Move the weights after a step: unscale, clip, step, zero; and how long that takes."""

import time

import torch

from penstock.optim.clip import clip_grad_norm_
from penstock.pipeline import Pipeline


class WeightUpdate:
    """Moves the weights of `pipe` by its gradients, which are gone then.

    With `max_norm` gradients are scaled down to it.
    """

    norm: float | None = None
    """Of the newest step's gradients before they were clipped; None where they are not."""
    seconds: float = 0.0
    """What the newest step took, as its host sees it."""

    def __init__(
        self,
        pipe: Pipeline,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler,
        max_norm: float | None,
    ) -> None:
        self._pipe, self._optimizer, self._scaler = pipe, optimizer, scaler
        self._max_norm = max_norm

    def run(self) -> None:
        """Move the weights once."""
        start_s = time.perf_counter()
        if self._max_norm is not None:
            self._scaler.unscale_(self._optimizer)
            self.norm = float(clip_grad_norm_(self._pipe, self._max_norm))
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._optimizer.zero_grad()
        self.seconds = time.perf_counter() - start_s
