"""`penstock.check`: it says EQUAL when every bit is, and where it starts when one is not."""

import json
import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock import Recompute
from penstock.schedules import one_f_one_b


class Draws(nn.Module):
    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + self.draw())


class _Stateful(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        _Stateful.calls += 1
        return gradient * _Stateful.calls


class StatefulBackward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(_Stateful.apply(x))


def report(*middle: nn.Module) -> penstock.CheckReport:
    layers = nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), *middle, nn.Linear(8, 3)
    )
    batch = torch.randn(11, 4), torch.randint(0, 3, (11,))
    how: dict[str, Any] = {"schedule": one_f_one_b, "recompute": Recompute.STAGE}
    how |= {"num_stages": 3, "num_microbatches": 4}
    return penstock.check(layers, *batch, loss=nn.CrossEntropyLoss(), **how)


def test_a_sound_model_is_equal_and_every_tensor_is_listed() -> None:
    found = report(nn.ReLU(inplace=True))
    assert found.equal
    assert found.verdict.startswith("EQUAL: all")
    assert {row.kind for row in found.rows} == {"loss", "gradient", "buffer", "output"}
    assert [row.name for row in found.rows if row.kind == "gradient"] == [
        *("0.weight", "0.bias", "1.weight", "1.bias", "4.weight", "4.bias"),
    ]
    assert json.loads(found.to_json())["equal"] is True


@pytest.mark.parametrize(
    "draw", (random.random, lambda: numpy.random.rand(), lambda: torch.rand(()))
)
def test_a_layer_that_draws_from_global_generators_in_both_modes_is_equal(draw) -> None:
    assert report(Draws(draw)).equal


def test_a_forward_that_differs_is_named_with_likely_causes() -> None:
    found = report(Draws(random.Random().random))
    assert not found.equal
    assert found.first_difference == "the forward of layer '3' (Draws)"
    assert any("generator of its own" in cause for cause in found.likely_causes)
    assert found.verdict in str(found)


def test_a_backward_that_differs_is_named() -> None:
    found = report(StatefulBackward())
    assert not found.equal
    assert "starts at the backward of layer" in found.verdict
    differing = {row.name for row in found.rows if not row.equal}
    assert "4.weight" not in differing  # after the fault, in the order of the backward


def test_the_model_given_is_not_touched() -> None:
    layers = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    before = {name: value.clone() for name, value in layers.state_dict().items()}
    options: dict[str, Any] = {"num_stages": 2, "num_microbatches": 3}
    penstock.check(layers, torch.randn(6, 4), torch.randn(6, 3), loss=nn.MSELoss(), **options)
    assert all(torch.equal(before[name], value) for name, value in layers.state_dict().items())
    assert layers[0].weight.grad is None


def test_a_loss_that_holds_on_to_the_model_given_is_refused() -> None:
    layer = nn.Linear(4, 3)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(output, target) + layer.weight.pow(2).sum()

    with pytest.raises(penstock.errors.ConfigError, match="holds on to that model"):
        penstock.check([layer], torch.randn(5, 4), torch.randn(5, 3), loss=loss, num_stages=1)


class Weighing(nn.Module):
    """A loss with a parameter and a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        return nn.functional.mse_loss(output * self.scale, target)


def test_a_loss_that_is_a_module_is_compared_and_left_as_it_was() -> None:
    loss, x = Weighing(), torch.randn(5, 4, requires_grad=True)
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    sizes: dict[str, Any] = {"num_stages": 2, "num_microbatches": 2}
    found = penstock.check(layers, x, torch.randn(5, 3), loss=loss, **sizes)
    assert found.equal, found
    assert {"loss.scale", "loss.calls"} <= {row.name for row in found.rows}
    assert loss.scale.grad is None
    assert x.grad is None
    assert loss.get_buffer("calls") == 0


class Zeros(nn.Module):
    """Give zeros, with the sign of how often it was called."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        Zeros.calls += 1
        return x * (0.0 if Zeros.calls <= 2 else -0.0)


def test_minus_zero_is_not_zero() -> None:
    Zeros.calls = 0
    layers, (x, y) = nn.Sequential(nn.Linear(4, 4), Zeros()), torch.randn(2, 5, 4)
    sizes: dict[str, Any] = {"num_stages": 1, "num_microbatches": 1}
    how: dict[str, Any] = {"loss": nn.MSELoss(), "recompute": Recompute.NEVER}
    found = penstock.check(layers, x, y, **sizes, **how)
    assert not found.equal
    assert found.first_difference == "the forward of layer '1' (Zeros)"
