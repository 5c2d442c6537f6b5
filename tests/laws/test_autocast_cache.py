"""Casts of autocast and weights in `parametrize.cached()` are computed once, for one stage."""

import copy
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.flop_counter import FlopCounterMode

import penstock
from penstock.errors import ConfigError
from penstock.schedules import gpipe
from tests.distributed.launch import run_python
from tests.every_schedule import IN_TWO_PARTS
from tests.model.capture.any_models.chain import WIDTH, Chain, inputs
from tests.model_parts import Does
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


PARTS = 4


class Cached(nn.Module):  # reads a weight several times, and computes it once
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        parametrize.register_parametrization(self.linear, "weight", Does(torch.exp))

    def forward(self, x: Tensor) -> Tensor:
        with parametrize.cached():
            for _ in range(3):
                x = self.linear(x).tanh()
            return x


class Slow(Cached):
    """Stays inside `cached()` until another stage has gone through all micro-batches."""

    def __init__(self, others: threading.Event) -> None:
        super().__init__()
        self.others = others

    def forward(self, x: Tensor) -> Tensor:
        with parametrize.cached():
            assert self.others.wait(60)
            return super().forward(x)


class Quick(Cached):
    def __init__(self, done: threading.Event) -> None:
        super().__init__()
        self.done, self.calls = done, 0

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        self.calls += 1
        if self.calls == PARTS:
            self.done.set()
        return x


class Shared(Chain):  # calls a block with a cached weight at both ends
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Cached() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in (self.blocks[0], self.blocks[1], self.blocks[0]):
            x = block(x)
        return x


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [parameter.grad for parameter in model.parameters()]


def expected(model: nn.Module, x: Tensor) -> list[Tensor | None]:
    model = copy.deepcopy(model)
    for part in x.chunk(PARTS):
        (model(part).square().mean() / PARTS).backward()
    return gradients(model)


def square(y: Tensor, _: Tensor) -> Tensor:
    return y.square().mean()


def test_a_stage_inside_cached_leaves_the_weights_of_others_alone() -> None:
    torch.manual_seed(0)
    done = threading.Event()
    quick, slow, x = Quick(done), Slow(done), inputs(2 * PARTS)
    plain = nn.Sequential(Cached(), Cached())
    plain.load_state_dict(nn.Sequential(quick, slow).state_dict())
    options: dict[str, Any] = {"recompute": penstock.Recompute.NEVER, "threads_per_stage": 1}
    options |= {"schedule": "gpipe"}
    with penstock.Pipeline(
        [quick, slow], partition=[1, 1], num_microbatches=PARTS, loss=square, **options
    ) as pipe:
        pipe.train_step(x, x)
        found = gradients(pipe)
    for one, other in zip(found, expected(plain, x), strict=True):
        assert one is not None and other is not None and torch.equal(one, other)


@pytest.mark.parametrize("recompute", penstock.Recompute)
def test_a_captured_block_of_two_stages_caches_in_both(recompute: penstock.Recompute) -> None:
    torch.manual_seed(0)
    model, x = Shared(), inputs(2 * PARTS)
    whole = expected(model, x)
    options: dict[str, Any] = {"recompute": recompute, "example_inputs": x, "threads_per_stage": 1}
    with penstock.Pipeline(model, 3, num_microbatches=PARTS, loss=square, **options) as pipe:
        for _ in range(2):
            model.zero_grad()
            pipe.train_step(x, x)
            for one, other in zip(gradients(model), whole, strict=True):
                assert one is not None and other is not None and torch.equal(one, other)


@pytest.mark.parametrize("transport", IN_ONE_PROCESS)
def test_a_step_inside_cached_is_refused_and_an_evaluation_is_not(transport) -> None:
    torch.manual_seed(0)
    layers, x = [Cached(), Cached()], inputs(2 * PARTS)
    pipe = penstock.Pipeline(layers, 2, num_microbatches=PARTS, loss=square, transport=transport)
    with pipe, parametrize.cached():
        for call in (lambda: pipe.train_step(x, x), lambda: pipe(x)):
            with pytest.raises(ConfigError, match="forward of the layer"):
                call()
        with torch.no_grad():
            assert torch.equal(pipe.eval_step(x), nn.Sequential(*layers)(x))


FIRST_INSIDE = """
import torch
from torch import nn
from torch.nn.utils import parametrize
import penstock
from tests.laws.test_autocast_cache import PARTS, Cached, expected, gradients, inputs, square

torch.manual_seed(0)
layers, x = nn.Sequential(Cached(), Cached()), inputs(2 * PARTS)
whole = expected(layers, x)
with parametrize.cached():
    layers(x)  # so that there are cached weights already
    pipe = penstock.Pipeline(
        layers, 2, num_microbatches=PARTS, loss=square, threads_per_stage=1
    )
    pipe.train_step(x, x)
    assert all(map(torch.equal, gradients(layers), whole))
    assert torch.equal(pipe.eval_step(x), layers(x))
layers.zero_grad()
pipe.train_step(x, x)
assert all(map(torch.equal, gradients(layers), whole))
with parametrize.cached():
    assert layers[0].linear.weight is layers[0].linear.weight
assert layers[0].linear.weight is not layers[0].linear.weight
"""


def test_the_first_pipeline_of_a_process_may_be_made_inside_cached() -> None:
    done = run_python("-c", FIRST_INSIDE)
    assert done.code == 0, done.output
