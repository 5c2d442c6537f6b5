"""Autocast casts a weight once for all its uses in a step, and anew for each step."""

import copy
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import penstock
from penstock.schedules import gpipe
from tests.every_schedule import IN_TWO_PARTS
from tests.ways import IN_ONE_PROCESS


class Twice(nn.Module):  # use one weight twice; other stages come to their end in between
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x))
        time.sleep(0.003)
        return torch.tanh(self.linear(y)).float()


def run_whole(whole: nn.Module, x: Tensor, y: Tensor) -> None:
    """Run the four micro-batches through the unsplit model."""
    for part, target in zip(x.split(2), y.split(2), strict=True):
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.mse_loss(whole(part), target)
        loss.backward(torch.full_like(loss, 1 / 4))


def compare_and_move(ours: list[nn.Parameter], whole: list[nn.Parameter]) -> None:
    """Compare gradients, and move the weights, so that the casts of this step are stale."""
    for parameter, expected in zip(ours, whole, strict=True):
        assert parameter.grad is not None and expected.grad is not None
        assert torch.equal(parameter.grad, expected.grad)
        parameter.data -= 0.1 * expected.grad
        expected.data -= 0.1 * expected.grad


@pytest.mark.parametrize("as_module", (False, True))
@pytest.mark.parametrize("schedule", (gpipe, IN_TWO_PARTS))
def test_a_weight_used_twice_is_cast_once_for_as_long_as_a_step_lasts(schedule, as_module) -> None:
    torch.manual_seed(0)
    ours = [Twice() for _ in range(4)]
    whole = nn.Sequential(*copy.deepcopy(ours))
    parameters = [p for layer in ours for p in layer.parameters()]
    x, y = torch.randn(8, 6), torch.randn(8, 6)
    options: dict[str, Any] = {"num_microbatches": 4, "threads_per_stage": 1, "schedule": schedule}
    with penstock.Pipeline(ours, 4, loss=F.mse_loss, **options) as pipe:
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.mse_loss(pipe(x), y) if as_module else pipe.train_step(x, y)
            if as_module:
                loss.backward()
            run_whole(whole, x, y)
            compare_and_move(parameters, list(whole.parameters()))


def descend(step: Callable[[], Any], parameters: list[nn.Parameter]) -> None:
    """Move the weights by the gradients of a step."""
    for parameter in parameters:
        parameter.grad = None
    step()
    for parameter in parameters:
        assert parameter.grad is not None
        parameter.data -= 0.1 * parameter.grad


@pytest.mark.filterwarnings("ignore::penstock.errors.ExecutionWarning")
@pytest.mark.parametrize("mode", (nullcontext, lambda: FlopCounterMode(display=False)))
@pytest.mark.parametrize("transport", IN_ONE_PROCESS)
def test_one_autocast_around_all_steps_trains_as_one_around_each(transport, mode) -> None:
    torch.manual_seed(0)
    ours = [Twice() for _ in range(2)]
    whole = nn.Sequential(*copy.deepcopy(ours))
    theirs, x, y = list(whole.parameters()), torch.randn(8, 6), torch.randn(8, 6)
    with penstock.Pipeline(
        ours, 2, num_microbatches=4, loss=F.mse_loss, transport=transport, threads_per_stage=1
    ) as pipe:
        parameters = list(pipe.parameters())
        pipe.train_step(x, y)  # the layers are balanced
        with torch.autocast("cpu", torch.bfloat16), mode():
            for _ in range(3):
                descend(
                    lambda: (pipe.train_step(x, y), pipe.eval_step(x), ours[0].linear(x)),
                    parameters,
                )
        for _ in range(3):
            descend(lambda: run_whole(whole, x, y), theirs)
    for mine, expected in zip(parameters, theirs, strict=True):
        assert torch.equal(mine, expected)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = whole(x)
        assert torch.equal(pipe.eval_step(x), expected)
