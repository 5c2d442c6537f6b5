"""Move the weights after a step: unscale, clip, step, zero; and judge the model by the samples
that are set aside, shared out over the replicas.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from penstock import Pipeline, clip_grad_norm_

from .tasks.task import Batch, Task


class Windows:
    """Takes batches `length` at a time; one that is not full stands alone."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._waiting: list[Batch] = []

    def take(self, batches: Iterator[Batch]) -> list[Batch]:
        """Return the next batches of an epoch that has some left."""
        found = [self._waiting.pop() if self._waiting else next(batches)]
        while len(found) < self._length and found[-1].is_full:
            batch = next(batches, None)
            if batch is None:
                break
            if not batch.is_full:
                self._waiting.append(batch)
                break
            found.append(batch)
        return found


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


def scores_of(
    task: Task, pipe: Pipeline, autocast: Callable[[], AbstractContextManager[object]]
) -> dict[str, float]:
    """Compute the task's figures; each batch runs inside what `autocast` returns.

    Each replica judges every D-th sample.  All make the same calls: where one has a sample less it
    takes the first one too, which does not count.
    """
    mesh = pipe.mesh
    own = list(range(mesh.replica, task.num_test, mesh.num_replicas))
    known = len(own)
    own += [0] * (-(-task.num_test // mesh.num_replicas) - known)
    counted, totals = 0, torch.zeros(0, dtype=torch.float64)
    for inputs, targets in task.tests(own):
        with autocast():
            outputs = pipe.eval_step(inputs)
        tally = task.tally(_on_cpu(outputs), targets)
        sums = tally[: max(0, known - counted)].sum(dim=0)
        totals, counted = sums + (totals if counted else 0), counted + len(tally)
    of_all = mesh.world.gather(totals.tolist(), "for the others to evaluate")
    once = [of_all[row[0]] for row in mesh.placement.ranks[0]]  # of each replica, on idle ranks
    return dict(task.scores([sum(column) for column in zip(*once, strict=True)]))


def _on_cpu(outputs: Any) -> Any:
    if isinstance(outputs, Tensor):
        return outputs.cpu()
    return type(outputs)(map(_on_cpu, outputs))  # an auxiliary head's beside the model's own
