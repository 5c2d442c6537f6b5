"""The time of a layer is that of its forward and of its backward, however the layers are found."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import Layers, capture
from penstock.costs.measuring.measure import TO_BALANCE, How, measure
from penstock.costs.records import LayerSeconds
from penstock.model.layer_list import as_layers
from penstock.runtime.planning import StageCalls


def measured(layers: Layers, inputs: Tensor, how: How | None = None) -> list[LayerSeconds]:
    found = measure(layers, inputs, how or How())
    return [found.seconds(n) for n in range(len(layers))]


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
    in_backward, in_forward, rest = measured(make(), torch.randn(2, 4))
    both_s = [each.forward_s + each.backward_s for each in (in_backward, in_forward, rest)]
    assert both_s == sorted(both_s, reverse=True)
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
def test_of_layers_that_are_alike_one_runs_backward_at_a_time(options, kinds) -> None:
    counted = (Counted(index, **some) for index, some in enumerate(options, start=1))
    layers = as_layers(nn.Sequential(nn.Linear(4, 4), *counted))
    Counting.num_backwards = 0
    times = measured(layers, torch.randn(2, 4))
    assert Counting.num_backwards == kinds * (TO_BALANCE.warming + TO_BALANCE.counting)
    assert len(set(times[1:])) == kinds


class Remembers(nn.Module):
    """Multiplies by something that was computed from its weight before."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.found: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        if not self.found:
            self.found.append(self.weight.exp().exp())
        return x * self.found[0]


@pytest.mark.parametrize("is_there_before", (False, True))
def test_what_a_layer_remembers_can_still_run_backward(is_there_before: bool) -> None:
    layer = Remembers()
    if is_there_before:
        layer.found.append(layer.weight.exp().exp())
    measured(as_layers(nn.Sequential(layer, layer, nn.Linear(4, 4))), torch.randn(2, 4))
    assert len(layer.found) == is_there_before  # what a layer finds while it is measured goes
    layer(torch.randn(2, 4)).sum().backward()
    assert layer.weight.grad is not None


def test_gradients_are_left_as_they_were() -> None:
    layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    before = {name: value.clone() for name, value in layers.state_dict().items()}
    found = as_layers(layers)
    measured(found, torch.randn(3, 4), How(call=StageCalls))
    assert all(parameter.grad is None for parameter in layers.parameters())
    after = layers.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


class Told(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str, tell: Callable[[str], None]) -> Tensor:
        ctx.name, ctx.tell = name, tell
        tell(f"F{name}")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        ctx.tell(f"B{ctx.name}")
        return gradients[0], None, None


class Tells(nn.Module):
    def __init__(self, name: str, calls: list[str]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.name, self.tell = name, calls.append  # a list itself is put back

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = Told.apply(x * self.weight, self.name, self.tell)
        return found


def test_layers_run_in_the_order_of_a_step() -> None:
    calls: list[str] = []
    layers = as_layers(nn.Sequential(*(Tells(name, calls) for name in "abc")))
    measured(layers, torch.randn(2, 4))
    runs = TO_BALANCE.warming + TO_BALANCE.counting
    assert " ".join(calls) == " ".join(["Fa Fb Fc Bc Bb Ba"] * runs)


class ColdInTheSecondRunToo(nn.Module):
    """Does in each of its first two calls what a process does once, for longer than is enough."""

    def __init__(self) -> None:
        super().__init__()
        self.cold = 2

    def forward(self, x: Tensor) -> Tensor:
        if self.cold:
            self.cold -= 1
            time.sleep(TO_BALANCE.enough_s)
        return x + 1


def test_what_the_first_two_runs_do_once_is_no_layers_time() -> None:
    layers = as_layers(nn.Sequential(nn.Linear(4, 4), ColdInTheSecondRunToo()))
    times = measured(layers, torch.randn(2, 4))
    assert times[1].forward_s < TO_BALANCE.enough_s
