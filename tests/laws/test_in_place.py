"""A value that a stage receives and changes in place: right, or refused, also in evaluation."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from penstock.errors import BoundaryError
from tests.models import vectors


class Base(nn.Module):
    """Give a value and a view of it."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2
        return y, y.view_as(y)


class AddInPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.add_(1.0)


class Join(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return (a * b)[:, :3]


@pytest.mark.parametrize("mode", (torch.no_grad, torch.inference_mode))
def test_an_evaluation_changes_no_value_that_another_one_would_show(
    mode: Callable[[], AbstractContextManager[None]],
) -> None:
    layers = [
        penstock.Layer(Base(), outputs=("a", "b")),
        penstock.Layer(AddInPlace(), inputs="a", outputs="c"),
        penstock.Layer(Join(), inputs=("c", "b")),
    ]
    x, _ = vectors(4, torch.Generator().manual_seed(1))
    with (
        penstock.Pipeline(layers, 3, num_microbatches=2, loss=F.mse_loss) as pipe,
        mode(),
        pytest.raises(BoundaryError, match="shares memory"),
    ):
        pipe.eval_step(x)
