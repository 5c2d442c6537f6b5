"""A value that a stage receives and changes in place: right, or refused, also in evaluation."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from penstock.errors import BoundaryError
from tests.laws.test_one_owner import changed_in_place
from tests.models import vectors


@pytest.mark.parametrize("mode", (torch.no_grad, torch.inference_mode))
def test_an_evaluation_changes_no_value_that_another_one_would_show(mode) -> None:
    x, _ = vectors(4, torch.Generator().manual_seed(1))
    pipe = penstock.Pipeline(changed_in_place(), 3, num_microbatches=2, loss=F.mse_loss)
    with pipe, mode(), pytest.raises(BoundaryError, match="shares memory"):
        pipe.eval_step(x)


class ChangesBatch(nn.Module):
    """Change the batch in place, and read it before the first block and after the last."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(1.5)
        h = x
        for block in self.blocks:
            h = torch.tanh(block(h))
        return h + x


@pytest.mark.parametrize("num_stages", (1, 2, 4))
def test_each_stage_that_reads_the_batch_changes_its_own_in_evaluation(num_stages: int) -> None:
    torch.manual_seed(0)
    model, x = ChangesBatch(), torch.randn(4, 6)
    layers = penstock.capture(model, x.clone(), inputs="everywhere")
    with penstock.Pipeline(
        layers, num_stages, num_microbatches=2, loss=F.mse_loss, threads_per_stage=1
    ) as pipe:
        found = pipe.eval_step(x.clone())
    with torch.no_grad():
        expected = torch.cat([model(part.clone()) for part in x.split(2)])
    assert torch.equal(found, expected)


class DoublesData(nn.Module):  # double a value past autograd, before each block; add it at the end
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        skip = x + 0
        for block in self.blocks:
            skip.data.mul_(2)
            x = torch.tanh(block(x))
        return x + skip


@pytest.mark.parametrize("recompute", penstock.Recompute)
@pytest.mark.parametrize("partition", ((1, 3), (2, 2), (1, 1, 1, 1)), ids=str)
def test_changes_that_autograd_does_not_see_are_made_once(partition, recompute) -> None:
    torch.manual_seed(0)
    model = DoublesData()
    parameters, x, y = list(model.parameters()), torch.randn(6, 6), torch.randn(6, 6)
    options: dict[str, Any] = {"loss": F.mse_loss, "recompute": recompute, "threads_per_stage": 1}
    with penstock.Pipeline(
        penstock.capture(model, x), partition=partition, num_microbatches=3, **options
    ) as pipe:
        for _ in range(2):
            model.zero_grad()
            pipe.train_step(x, y)
            found = [p.grad for p in parameters]
            model.zero_grad()
            for part, target in zip(x.split(2), y.split(2), strict=True):
                loss = F.mse_loss(model(part), target)
                loss.backward(torch.full_like(loss, 1 / 3))
            for parameter, gradient in zip(parameters, found, strict=True):
                assert parameter.grad is not None and gradient is not None
                assert torch.equal(parameter.grad, gradient)
