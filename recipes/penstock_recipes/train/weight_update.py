"""Update the weights after a step, and evaluate the model on the held-out samples."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from penstock import Pipeline, clip_grad_norm_

from .tasks.task import Batch, Task


class Windows:
    """Groups batches into windows of `length`; a batch that is not full is its own window."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._waiting: list[Batch] = []

    def take(self, batches: Iterator[Batch]) -> list[Batch]:
        """Return the next window of an epoch that has batches left."""
        window = [self._waiting.pop() if self._waiting else next(batches)]
        while len(window) < self._length and window[-1].is_full:
            batch = next(batches, None)
            if batch is None:
                break
            if not batch.is_full:
                self._waiting.append(batch)
                break
            window.append(batch)
        return window


class WeightUpdate:
    """Updates the weights of `pipe`: unscale, clip to `max_norm`, step, clear the gradients.

    Without `max_norm`, only the updates that are logged measure the norm.
    """

    norm: float | None = None
    """Gradient norm of the newest step before clipping, where it was measured."""
    seconds: float = 0.0
    """Seconds of the newest update on the host."""

    def __init__(
        self,
        pipe: Pipeline,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler,
        max_norm: float | None,
    ) -> None:
        self._pipe, self._optimizer, self._scaler = pipe, optimizer, scaler
        self._max_norm = max_norm

    def run(self, *, is_logged: bool) -> None:
        """Update the weights once; `is_logged` measures the gradient norm in any case."""
        start_s = time.perf_counter()
        if is_logged or self._max_norm is not None:
            self._scaler.unscale_(self._optimizer)
            self.norm = float(clip_grad_norm_(self._pipe, self._max_norm or math.inf))
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._optimizer.zero_grad()
        self.seconds = time.perf_counter() - start_s


def scores_of(
    task: Task, pipe: Pipeline, autocast: Callable[[], AbstractContextManager[object]]
) -> dict[str, float]:
    """Compute the task's scores; each batch runs inside an `autocast()` context.

    Each replica evaluates every D-th sample, and all make the same calls.  A replica with one
    sample less repeats sample 0, which does not count.
    """
    # Choose this replica's samples, padded to the same number everywhere.
    mesh = pipe.mesh
    samples = list(range(mesh.replica, task.num_test, mesh.num_replicas))
    known = len(samples)
    samples += [0] * (-(-task.num_test // mesh.num_replicas) - known)
    # Sum the tallies of the samples that count.
    counted, totals = 0, torch.zeros(0, dtype=torch.float64)
    for inputs, targets in task.tests(samples):
        with autocast():
            outputs = pipe.eval_step(inputs)
        tally = task.tally(_on_cpu(outputs), targets)
        sums = tally[: max(0, known - counted)].sum(dim=0)
        totals, counted = sums + (totals if counted else 0), counted + len(tally)
    # Add up one process of each replica; idle ranks take part in the gather too.
    of_all = mesh.world.gather(totals.tolist(), "for the others to evaluate")
    once = [of_all[row[0]] for row in mesh.placement.ranks[0]]
    return dict(task.scores([sum(column) for column in zip(*once, strict=True)]))


def _on_cpu(outputs: Any) -> Any:
    if isinstance(outputs, Tensor):
        return outputs.cpu()
    return type(outputs)(map(_on_cpu, outputs))  # the model's and an auxiliary head's
