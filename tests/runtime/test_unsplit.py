"""A plan names the layers because of which backwards in two parts are not, with the reasons."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

import penstock
from penstock.planner.unsplit import Unsplit
from penstock.schedules import zb_h1
from tests.every_schedule import IN_TWO_PARTS


class Calling(nn.Module):
    """Calls a function with a layer and the input."""

    def __init__(
        self, function: Callable[[Any, Tensor], Any], layer: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.function, self.layer = function, layer or nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Any:
        return self.function(self.layer, x)


def hooked(layer: nn.Module) -> nn.Module:
    layer.get_parameter("weight").register_hook(lambda gradient: gradient * 2)
    return layer


def with_a_hooked_tensor() -> nn.Module:
    scale = torch.ones(6, requires_grad=True)
    scale.register_hook(lambda gradient: gradient * 2)
    return Calling(lambda layer, x: layer(x) * scale)


def of_one_weight() -> list[nn.Module]:
    layers = [nn.Linear(6, 6, bias=False) for _ in range(3)]
    layers[1].weight = layers[2].weight = layers[0].weight
    return [*layers, nn.Linear(6, 6)]


def sometimes(layer: nn.Module, x: Tensor) -> Any:
    return reentrant(layer, x) if float(x.detach().flatten()[0]) > 0 else layer(x)


def reentrant(layer: nn.Module, x: Tensor) -> Any:
    return checkpoint(layer, x, use_reentrant=True)


class Passing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Loss(nn.Module):
    """Has a weight that is used three times."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return mse_loss(self.linear(self.linear(self.linear(output))), target)


ALL = "100% of its weights: "
CASES: dict[str, tuple[Callable[[], list[nn.Module]], str]] = {
    "used three times": (
        lambda: [Calling(lambda layer, x: layer(layer(layer(x))))],
        f"layer '1' (Calling), {ALL}one is used 3 times",
    ),
    "of three layers": (of_one_weight, f"layer '1' (Linear), {ALL}one is used 3 times"),
    "recurrent": (
        lambda: [Calling(lambda lstm, x: lstm(x)[0], nn.LSTM(6, 6))],
        f"layer '1' (Calling), {ALL}MkldnnRnnLayer cannot be cut",
    ),
    "bilinear": (
        lambda: [nn.Linear(6, 6), Calling(lambda f, x: f(x, x), nn.Bilinear(6, 6, 6))],
        f"layer '2' (Calling), {ALL}Trilinear cannot be cut",
    ),
    "from others": (
        lambda: [Calling(lambda layer, x: x.mm(layer.weight.exp())), nn.Linear(6, 6)],
        f"layer '1' (Calling), {ALL}Exp cannot be cut",
    ),
    "in a checkpoint": (
        lambda: [Calling(lambda layer, x: checkpoint(layer, x, use_reentrant=False))],
        f"layer '1' (Calling), {ALL}Addmm has read what a checkpoint computes again, or has a "
        "form that is not known",
    ),
    "by two": (
        lambda: [Calling(lambda layer, x: layer(x) + x.mm(layer.weight.cos()))],
        f"layer '1' (Calling), {ALL}Addmm leads to another gradient that cannot wait and Cos "
        "cannot be cut",
    ),
    "in a reentrant checkpoint": (
        lambda: [nn.Linear(6, 6), Calling(reentrant), nn.Linear(6, 6)],
        "all of stage 1, because of layer '2' (Calling), a checkpoint with use_reentrant=True "
        "runs a backward of its own",
    ),
    "in a reentrant checkpoint, sometimes": (
        lambda: [Calling(sometimes), nn.Linear(6, 6)],
        "all of stage 1, because of layer '1' (Calling), a checkpoint with use_reentrant=True "
        "runs a backward of its own, in 2 of 4 backwards",
    ),
    "a hook of a norm": (
        lambda: [nn.Linear(6, 6), nn.Sequential(hooked(nn.LayerNorm(6)), nn.Linear(6, 6))],
        "all of stage 1, because of layer '2' (Sequential), 0.weight has a hook on its gradient, "
        "and is no weight that can wait",
    ),
    "a hook of a tensor": (
        lambda: [nn.Linear(6, 6), with_a_hooked_tensor()],
        "all of stage 1, because of layer '2' (Calling), a tensor that is no parameter has a hook "
        "on its gradient, and is no weight that can wait",
    ),
    "norms alone": (
        lambda: [nn.Tanh(), nn.LayerNorm(6)],
        "all of stage 1, because of layer '1' (Tanh), nothing in the stage can be cut",
    ),
}


def pipeline(layers: list[nn.Module], **options: Any) -> penstock.Pipeline:
    """Make a pipeline whose second stage has all layers but the first."""
    given = {"partition": [1, len(layers) - 1], "loss": mse_loss, **options}
    given |= {"num_microbatches": 4, "schedule": IN_TWO_PARTS, "threads_per_stage": 1}
    return penstock.Pipeline(layers, **given)


def train(pipe: penstock.Pipeline) -> list[str]:
    """Train a step; return what the plan then says of backwards in two parts, also when read."""
    x = torch.ones(8, 6) * torch.tensor([1, 1, -1, -1, 1, 1, -1, -1])[:, None]
    pipe.train_step(x, torch.ones(8, 6))
    stored = replace(pipe.plan, schedule=zb_h1())
    again = penstock.Plan.from_json(stored.to_json())
    assert again == stored
    assert told(again) == told(pipe.plan)
    return told(pipe.plan)


def told(plan: penstock.Plan) -> list[str]:
    return [line for line in str(plan).splitlines() if line.startswith("backward")]


@pytest.mark.parametrize(("make", "said"), CASES.values(), ids=CASES.keys())
def test_the_first_step_tells_the_plan_what_is_not_split_and_why(
    make: Callable[[], list[nn.Module]], said: str
) -> None:
    first = nn.Linear(6, 6)
    nn.init.eye_(first.weight)
    nn.init.zeros_(first.bias)
    with pipeline([first, *make()]) as pipe:
        assert told(pipe.plan) == ["backwards in two parts: the first step shows which"]
        assert train(pipe) == [f"backward in one part: {said}"]
        assert train(pipe) == [f"backward in one part: {said}"]


def test_where_all_is_split_the_plan_says_so() -> None:
    layers = [nn.Linear(6, 6), nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6)), nn.Tanh()]
    with pipeline(layers) as pipe:
        assert train(pipe) == ["backwards in two parts: all layers"]
        assert pipe.plan.unsplit == ()


def test_a_first_layer_before_a_function_is_named() -> None:
    function = Calling(lambda layer, x: Passing.apply(layer(x)))
    with pipeline([nn.Linear(6, 6), function, nn.Linear(6, 6)], partition=[2, 1]) as pipe:
        (said,) = train(pipe)
    assert "layer '0' (Linear), 100% of its weights: Addmm is near a torch.autograd.F" in said


def test_the_loss_is_named() -> None:
    with pipeline([nn.Linear(6, 6), nn.Linear(6, 6)], loss=Loss()) as pipe:
        assert train(pipe) == [f"backward in one part: the loss, {ALL}one is used 3 times"]
        assert pipe.plan.unsplit == (Unsplit(2, f"{ALL}one is used 3 times"),)


def test_measuring_the_layers_tells_the_plan_before_the_first_step() -> None:
    lstm = Calling(lambda lstm, x: lstm(x)[0], nn.LSTM(6, 6))
    layers = [nn.Linear(6, 6), lstm, nn.LayerNorm(6), nn.Linear(6, 6), Calling(reentrant)]
    x = torch.randn(8, 6)
    with pipeline(layers, partition=None, num_stages=2, example_inputs=x) as pipe:
        before = told(pipe.plan)
        assert before == [
            f"backward in one part: layer '1' (Calling), {ALL}MkldnnRnnLayer cannot be cut",
            "backward in one part: all of stage 1, because of layer '4' (Calling), a checkpoint "
            "with use_reentrant=True runs a backward of its own",
        ]


def test_without_divided_backwards_nothing_is_said() -> None:
    with penstock.Pipeline(
        [nn.Linear(6, 6)], num_stages=1, loss=mse_loss, num_microbatches=1
    ) as pipe:
        pipe.train_step(torch.ones(2, 6), torch.ones(2, 6))
        assert told(pipe.plan) == []
        assert pipe.plan.unsplit is None
