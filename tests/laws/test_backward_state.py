"""State that a backward changes and a forward reads: as in the unsplit model, or refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import penstock
from penstock.errors import StateError
from penstock.schedules import gpipe, one_f_one_b, zb_h1
from tests.laws.test_equality_or_refusal import model
from tests.models import drawn
from tests.side_by_side import assert_trains_like_unsplit
from tests.ways import WAYS, WHOLE_STAGES, one_each

Write = Callable[[Any, Tensor], None]


class _Noting(torch.autograd.Function):
    """The identity; its backward lets `write` put the largest gradient into a module."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module, write: Write) -> Tensor:
        ctx.module, ctx.write = module, write
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.write(ctx.module, gradient.abs().amax())
        return gradient, None, None


class Scaling(nn.Module):
    """Scale by the largest gradient of the backward before, as fp8 with delayed scaling does."""

    def __init__(self, write: Write) -> None:
        super().__init__()
        self.register_buffer("amax", torch.ones(()))
        self.amax: Tensor
        self.attribute, self.write = torch.ones(()), write

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Noting.apply(x / (1 + self.amax * self.attribute), self, self.write)
        return y


def into_buffer(module: Any, amax: Tensor) -> None:
    module.amax.copy_(amax)


def another_buffer(module: Any, amax: Tensor) -> None:
    module.amax = amax


def into_attribute(module: Any, amax: Tensor) -> None:
    module.attribute.copy_(amax)


def layers(write: Write = into_buffer) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(6, 6), Scaling(write), nn.Linear(6, 3)]


def train(of: list[nn.Module], num_microbatches: int, **options: Any) -> None:
    options = {"partition": (2, 1), "threads_per_stage": 1, **options}
    with penstock.Pipeline(
        of, num_microbatches=num_microbatches, loss=F.mse_loss, **options
    ) as pipe:
        for _ in range(2):
            pipe.train_step(*drawn(8))


@pytest.mark.parametrize(
    "way, write", one_each(WAYS, (into_buffer, another_buffer, into_attribute))
)
def test_a_step_that_reads_it_in_another_order_is_refused(way: dict[str, Any], write: Any) -> None:
    with pytest.raises(StateError, match=r"of a Scaling changed its .* num_microbatches=1"):
        train(layers(write), 4, **way)


@pytest.mark.parametrize("way", WAYS)
def test_with_one_micro_batch_it_is_the_unsplit_models(way: dict[str, Any]) -> None:
    assert_trains_like_unsplit(model(layers), 8, partition=(2, 1), num_microbatches=1, **way)


@pytest.mark.parametrize("recompute", WHOLE_STAGES)
def test_a_last_stage_that_keeps_the_order_trains_as_unsplit(recompute: Any) -> None:
    how: dict[str, Any] = {"partition": (1, 2), "recompute": recompute}
    made = model(layers)
    assert_trains_like_unsplit(made, 8, num_microbatches=4, schedule=one_f_one_b, **how)
    with pytest.raises(StateError):
        train(layers(), 4, schedule=gpipe, **how)


def test_the_check_refuses_it_too() -> None:
    def checked(num_microbatches: int) -> penstock.CheckReport:
        options: dict[str, Any] = {"num_stages": 2, "num_microbatches": num_microbatches}
        options |= {"schedule": gpipe}
        return penstock.check(nn.Sequential(*layers()), *drawn(8), loss=F.mse_loss, **options)

    with pytest.raises(StateError, match="buffer 'amax'"):
        checked(4)
    assert checked(1).equal


class Shifting(nn.Module):  # parameters of which autograd saves nothing: a table and a shift
    def __init__(self) -> None:
        super().__init__()
        self.table, self.shift = nn.Embedding(3, 6), nn.Parameter(torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.shift + self.table.weight[0]
        return y


def step_in_a_hook(of: list[nn.Module], name: str) -> None:
    """Step one parameter as soon as its gradient is there, as torch's tutorial does."""
    parameter = nn.Sequential(*of).get_parameter(name)
    optimizer = torch.optim.SGD([parameter], lr=0.1)

    def step(_: Tensor) -> None:
        optimizer.step()
        optimizer.zero_grad()

    parameter.register_post_accumulate_grad_hook(step)


@pytest.mark.parametrize("name", ("0.bias", "1.shift", "1.table.weight"))
@pytest.mark.parametrize("schedule", (gpipe, one_f_one_b, zb_h1()), ids=str)
def test_an_optimizer_that_steps_in_a_hook_is_refused(name: str, schedule: Any) -> None:
    of = [nn.Linear(6, 6), Shifting(), nn.Linear(6, 3)]
    step_in_a_hook(of, name)
    how: dict[str, Any] = {"schedule": schedule, "recompute": penstock.Recompute.NEVER}
    with pytest.raises(StateError, match=r"changed a parameter .* train with num_microbatches=1"):
        train(of, 4, **how)
    train(of, 1, **how)  # as the unsplit model's


NEVER = penstock.Recompute.NEVER


def test_a_hook_that_comes_after_the_first_step_is_seen_too() -> None:
    of = [nn.Linear(6, 6), Shifting(), nn.Linear(6, 3)]
    with penstock.Pipeline(
        of, partition=(2, 1), num_microbatches=4, loss=F.mse_loss, recompute=NEVER
    ) as pipe:
        pipe.train_step(*drawn(8))
        step_in_a_hook(of, "1.shift")
        with pytest.raises(StateError, match="changed a parameter"):
            pipe.train_step(*drawn(8))


class Seen(nn.Module):  # keep what it saw for whoever asks, in a checkpoint as well
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.features: Tensor | None = None
        self.gradient: Tensor | None = None
        self.register_full_backward_hook(self._keep)

    def _keep(self, _: nn.Module, __: Any, gradients: Any) -> None:
        self.gradient = gradients[0]

    def _compute(self, x: Tensor) -> Tensor:
        self.features = self.norm(self.linear(x))
        return self.features

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self._compute, x, use_reentrant=False)
        return y


@pytest.mark.parametrize("way", WAYS)
def test_hooks_and_checkpoints_may_keep_what_they_saw(way: dict[str, Any]) -> None:
    torch.manual_seed(0)
    seen = Seen()
    train([nn.Linear(6, 6), seen, nn.Linear(6, 3)], 4, **way)
    assert seen.gradient is not None
