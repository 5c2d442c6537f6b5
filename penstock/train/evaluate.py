"""Judge a model by the samples that are set aside, shared out over the replicas."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from penstock.model.pytree import tree_map
from penstock.pipeline import Pipeline

from .tasks.task import Task


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
        tally = task.tally(tree_map(Tensor.cpu, outputs), targets)
        sums = tally[: max(0, known - counted)].sum(dim=0)
        totals, counted = sums + (totals if counted else 0), counted + len(tally)
    of_all = mesh.replicas.gather(totals.tolist(), "for the others to evaluate")
    return dict(task.scores([sum(column) for column in zip(*of_all, strict=True)]))
