"""The time of a layer is that of its forward and of its backward, however the layers are found."""

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import Layers, capture
from penstock.costs.measure import REPEATS, measure_layers
from penstock.model.layer_list import as_layers


class _Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return gradients[0], None, None


class Slow(nn.Module):
    """Takes so long, and takes what came before it too."""

    def __init__(self, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.took = forward_s, backward_s

    def forward(self, x: Tensor, before: Tensor | None = None) -> Tensor:
        y = x * self.weight if before is None else x * self.weight + before
        found: Tensor = _Slow.apply(y, *self.took)
        return found


class Skips(nn.Module):
    """Hands the input of each block to the next one as well: what follows uses what came before,
    by two ways.
    """

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        before = x
        for block in self.blocks:
            x, before = block(x, before), x
        return x


def blocks() -> list[nn.Module]:
    return [Slow(0.0, 0.06), Slow(0.015, 0.0), Slow(0.0, 0.0)]


def chained() -> Layers:
    return as_layers(nn.Sequential(*blocks()))


def captured() -> Layers:
    return capture(Skips(*blocks()), torch.randn(2, 4))


@pytest.mark.parametrize("make", (chained, captured))
def test_a_slow_backward_counts_for_its_own_layer(make: Any) -> None:
    in_backward, in_forward, rest = measure_layers(make(), torch.randn(2, 4), 1)
    assert sum(in_backward) > sum(in_forward) > sum(rest)
    assert in_backward.backward_s > in_backward.forward_s
    assert in_forward.forward_s > in_forward.backward_s


class Counting(torch.autograd.Function):
    num_backwards = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        Counting.num_backwards += 1
        return gradients[0]


class Counted(nn.Module):
    """A layer with settings of every kind, whose backward is counted."""

    def __init__(self, index: int, width: int = 4, drops: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.layer_idx, self.widths, self.drop_prob = index, {"hidden": [width]}, drops
        self.register_forward_hook(lambda *_: None)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = Counting.apply(x * self.weight)
        return found


@pytest.mark.parametrize(
    ("options", "kinds"),
    [
        ([{}, {}, {}, {}], 1),
        ([{}, {"width": 5}, {}, {"width": 5}], 2),
        ([{"drops": 0.0}, {"drops": 0.1}, {"drops": 0.2}, {"drops": 0.3}], 2),
    ],
)
def test_the_backward_of_layers_that_are_alike_is_measured_once(
    options: list[dict[str, Any]], kinds: int
) -> None:
    counted = (Counted(index, **some) for index, some in enumerate(options, start=1))
    layers = as_layers(nn.Sequential(nn.Linear(4, 4), *counted))
    Counting.num_backwards = 0
    times = measure_layers(layers, torch.randn(2, 4), 1)
    assert Counting.num_backwards == kinds * REPEATS
    assert len(set(times[1:])) == kinds


class ColdAtFirst(Slow):
    """Takes longer at its first call, as a process's first convolution does."""

    num_calls = 0

    def forward(self, x: Tensor, before: Tensor | None = None) -> Tensor:
        ColdAtFirst.num_calls += 1
        time.sleep(0.7 if ColdAtFirst.num_calls == 1 else 0.0)
        return super().forward(x, before)


def test_what_a_process_does_once_is_no_cost_of_a_layer() -> None:
    layers = as_layers(nn.Sequential(ColdAtFirst(0.0, 0.0), nn.Linear(4, 4)))
    assert measure_layers(layers, torch.randn(2, 4), 1)[0].forward_s < 0.5
