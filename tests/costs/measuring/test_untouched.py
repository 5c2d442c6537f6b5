"""What layers write on their parameters while they are measured is not there afterwards."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import penstock


def into_grad(weight: Any, found: Tensor) -> None:
    weight.grad = found if weight.grad is None else weight.grad + found


def into_main_grad(weight: Any, found: Tensor) -> None:
    weight.main_grad.add_(found)


def into_new_attribute(weight: Any, found: Tensor) -> None:
    weight.total = getattr(weight, "total", 0) + found


class _Fused(torch.autograd.Function):
    """A product whose backward keeps the weight's gradient by itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, keep: Callable[..., None]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.keep = weight, keep
        return x @ weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        ctx.keep(ctx.weight, x.t() @ gradients[0])
        return gradients[0] @ ctx.weight.detach().t(), None, None


class Fused(nn.Module):
    def __init__(self, keep: Callable[..., None]) -> None:
        super().__init__()
        self.weight: Any = nn.Parameter(torch.randn(4, 4))
        self.keep = keep

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = _Fused.apply(x, self.weight, self.keep)
        return found


@pytest.mark.parametrize("keep", (into_grad, into_main_grad, into_new_attribute))
def test_gradients_that_functions_keep_are_those_of_the_first_step(keep) -> None:
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(4, 4), Fused(keep))]
    twins = copy.deepcopy(layers)
    for layer in (*layers, *twins):
        if isinstance(layer, Fused):
            layer.weight.main_grad = torch.zeros(4, 4)
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    for part, targets in zip(x.chunk(2), y.chunk(2), strict=True):
        (mse_loss(nn.Sequential(*twins)(part), targets) / 2).backward()
    with penstock.Pipeline(layers, num_stages=2, num_microbatches=2, loss=mse_loss) as pipe:
        pipe.train_step(x, y)
        assert pipe.plan.predicted_s is not None
    for layer, twin in zip(layers, twins, strict=True):
        for mine, reference in zip(layer.parameters(), twin.parameters(), strict=True):
            assert vars(mine).keys() == vars(reference).keys()
            pairs = [(value, vars(reference)[name]) for name, value in vars(mine).items()]
            if mine.grad is not None or reference.grad is not None:
                pairs.append((mine.grad, reference.grad))
            assert all(torch.equal(a, b) for a, b in pairs)


def test_hooks_of_parameters_do_not_run_for_measuring() -> None:
    layers = [nn.Linear(4, 4) for _ in range(4)]
    calls: list[str] = []
    weights = [layer.weight for layer in layers]
    handles = [w.register_hook(lambda _: calls.append("found")) for w in weights]
    for weight in weights:
        weight.register_post_accumulate_grad_hook(lambda _: calls.append("added"))
    before = [torch.ones(4, 4) for _ in weights]
    for weight, gradient in zip(weights, before, strict=True):
        weight.grad = gradient
    with penstock.Pipeline(layers, num_stages=2, num_microbatches=3, loss=mse_loss) as pipe:
        pipe.train_step(torch.randn(6, 4), torch.randn(6, 4))
        assert pipe.plan.predicted_s is not None
        assert sorted(calls) == ["added"] * 12 + ["found"] * 12
        assert all(w.grad is g for w, g in zip(weights, before, strict=True))
        handles[0].remove()
        pipe.train_step(torch.randn(6, 4), torch.randn(6, 4))
    assert calls.count("found") == 12 + 9
