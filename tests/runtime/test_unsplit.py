"""A layer whose gradients cannot wait is named, with the reason."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

import penstock
from penstock.runtime.unsplit import why_unsplit
from tests.every_schedule import divided


class Thrice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(self.linear(self.linear(x)))
        return y


class Reentrant(Thrice):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.linear, x, use_reentrant=True)
        return y


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.lstm(x)[0]
        return y


def hooked() -> nn.Module:
    norm = nn.LayerNorm(6)
    norm.weight.register_hook(lambda gradient: gradient * 2)
    return nn.Sequential(norm, nn.Linear(6, 6))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (Thrice, "100% of its weights: one is used 3 times"),
        (Reentrant, "use_reentrant=True runs a backward of its own"),
        (Recurrent, "100% of its weights: MkldnnRnnLayer cannot be cut"),
        (hooked, "0.weight has a hook on its gradient"),
        (lambda: nn.Bilinear(6, 6, 6), "100% of its weights: "),
    ],
)
def test_a_layer_that_is_not_split_says_why(make: Callable[[], nn.Module], reason: str) -> None:
    layer = make()
    x = torch.randn(2, 6, requires_grad=True).clone()
    found = why_unsplit(layer, [layer(x, x) if isinstance(layer, nn.Bilinear) else layer(x)])
    assert found is not None
    assert reason in found


@pytest.mark.parametrize(
    "layer",
    [nn.Linear(6, 6), nn.LayerNorm(6), nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 30))],
)
def test_a_layer_that_is_split_says_nothing(layer: nn.Module) -> None:
    assert why_unsplit(layer, [layer(torch.randn(2, 6, requires_grad=True).clone())]) is None


def test_measuring_the_layers_tells_the_plan() -> None:
    layers = [nn.Linear(6, 6), Recurrent(), nn.Linear(6, 6), nn.Linear(6, 6)]
    with penstock.Pipeline(
        layers, num_stages=2, num_microbatches=2, loss=mse_loss, schedule=divided
    ) as pipe:
        assert "one part" not in str(pipe.plan)
        pipe.train_step(torch.randn(4, 6), torch.randn(4, 6))
        assert pipe.plan.unsplit is not None
        assert [each.layer for each in pipe.plan.unsplit] == [1]
        assert "backward in one part: layer '1' (Recurrent)" in str(pipe.plan)
