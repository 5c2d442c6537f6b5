"""A version of a stage's weights is held until one of them is another."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from penstock.runtime.stage.weights import Owned, Weights


def add_in_place(layer: nn.Linear) -> None:
    with torch.no_grad():
        layer.weight += 1


def assign_data(layer: nn.Linear) -> None:
    layer.bias.data = layer.bias.data.clone()


def replace(layer: nn.Linear) -> None:
    layer.weight = nn.Parameter(layer.weight.detach().clone())


@pytest.mark.parametrize("change", [add_in_place, assign_data, replace])
def test_a_version_is_gone_once_a_weight_is_another(change: Callable[[nn.Linear], None]) -> None:
    layer = nn.Linear(2, 2)
    weights = Weights(Owned((nn.Sequential(nn.ReLU(), layer),)))
    seen = weights.shown
    layer(torch.ones(1, 2)).sum().backward()
    assert weights.holds(seen)
    change(layer)
    assert not weights.holds(seen)
    assert weights.holds(weights.shown)


def test_a_weight_that_modules_share_is_there_once() -> None:
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    other.weight = one.weight
    assert Weights(Owned((one, other))).owned.parameters == [one.weight, one.bias, other.bias]
