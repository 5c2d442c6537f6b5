"""Checkpoints of the user's own run layers again in the backward: nothing may count twice."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from tests.laws.test_equality_or_refusal import model
from tests.model_parts import Checkpointed
from tests.side_by_side import assert_trains_like_unsplit, pipeline
from tests.ways import WAYS, one_each

REENTRANT = pytest.mark.parametrize("way, reentrant", one_each(WAYS, (True, False)))


def block() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh())


@REENTRANT
def test_batch_norm_inside_moves_its_statistics_once(reentrant: bool, way: dict[str, Any]) -> None:
    def statistics(*, on: bool) -> list[Tensor]:
        torch.manual_seed(0)
        layers = [nn.Linear(6, 6), Checkpointed(block(), reentrant=reentrant, on=on)]
        layers.append(nn.Linear(6, 3))
        made = model(lambda: layers)
        with pipeline(made, made.build(), num_stages=3, num_microbatches=3, **way) as pipe:
            for x, y in made.batches(9, count=3):
                pipe.train_step(x, y)
        return [buffer.clone() for layer in layers for buffer in layer.buffers()]

    for inside, plain in zip(statistics(on=True), statistics(on=False), strict=True):
        assert torch.equal(inside, plain)


class Between(nn.Module):
    """Dropout on both sides of a checkpoint, and inside it, by a function and by a module."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        inside = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6))
        self.inside = Checkpointed(inside, reentrant=reentrant)

    def forward(self, x: Tensor) -> Tensor:
        first = self.inside(F.dropout(x, 0.3, self.training))
        return F.dropout(first + self.inside(first), 0.3, self.training)


@REENTRANT
def test_dropout_inside_is_drawn_again_as_it_was(reentrant: bool, way: dict[str, Any]) -> None:
    def layers() -> list[Any]:
        body = [nn.Linear(6, 6), Between(reentrant=reentrant), Between(reentrant=reentrant)]
        return [*body, nn.Dropout(0.2), nn.Linear(6, 3)]

    assert_trains_like_unsplit(model(layers), 7, partition=(2, 1, 2), num_microbatches=3, **way)


@REENTRANT
def test_a_checkpoint_that_is_switched_on_is_refused_once(reentrant: bool, way: Any) -> None:
    torch.manual_seed(0)
    dropping = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5))
    inner = Checkpointed(dropping, reentrant=reentrant, on=False)
    made = model(lambda: [nn.Linear(6, 6), inner, nn.Linear(6, 3)])
    built = made.build()
    ((x, y),) = made.batches(9, count=1)
    with pipeline(made, built, num_stages=3, num_microbatches=3, **way) as pipe:
        for _ in range(3):
            pipe.train_step(x, y)
        inner.on = True
        with pytest.raises(penstock.errors.RandomnessError, match=r"torch\.utils\.checkpoint"):
            pipe.train_step(x, y)
        found = []
        for inner.on in (True, False):
            pipe.zero_grad()
            pipe.step = 7
            pipe.train_step(x, y)
            found.append([p.grad for p in pipe.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


class Attention(nn.Module):
    """Attention without dropout, whose operators torch marks as random all the same."""

    def forward(self, x: Tensor) -> Tensor:
        heads = x.unflatten(1, (2, 1, -1)).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads, heads).flatten(1)


@REENTRANT
def test_attention_without_dropout_may_be_inside_next_to_a_layer_that_draws(
    reentrant: bool, way: dict[str, Any]
) -> None:
    def layers() -> list[Any]:
        inside = nn.Sequential(nn.Linear(6, 6), Attention())
        checkpointed = Checkpointed(inside, reentrant=reentrant)
        return [nn.Linear(6, 6), nn.Dropout(0.3), checkpointed, nn.Linear(6, 3)]

    assert_trains_like_unsplit(model(layers), 7, partition=(3, 1), num_microbatches=3, **way)


class _Doubling(torch.autograd.Function):
    """A checkpoint written by hand: what it draws in its forward it would draw again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.x, ctx.function = x, function
        return function(x.detach())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        with torch.enable_grad():
            x = ctx.x.detach().requires_grad_()
            return torch.autograd.grad(ctx.function(x), x, gradient)[0], None


class ByHand(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return _Doubling.apply(x, lambda v: F.dropout(v, 0.5))


@pytest.mark.parametrize("way", WAYS)
def test_a_checkpoint_written_by_hand_around_dropout_is_refused(way: dict[str, Any]) -> None:
    made = model(lambda: [nn.Linear(6, 6), ByHand(), nn.Linear(6, 3)])
    pipe = pipeline(made, made.build(), num_stages=3, num_microbatches=3, **way)
    with pipe, pytest.raises(penstock.errors.RandomnessError):
        for x, y in made.batches(9, count=2):
            pipe.train_step(x, y)


class Meeting(torch.autograd.Function):  # calls a function in its backward
    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Callable[[], Any]) -> Tensor:
        ctx.function = function
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.function()
        return gradient, None


class Calling(nn.Module):
    def __init__(self, function: Callable[[], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return Meeting.apply(x, self.function)


class Again(nn.Module):  # calls a function when it is run again in a backward
    def __init__(self, function: Callable[[], Any]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(6, 6), function

    def forward(self, x: Tensor) -> Tensor:
        if torch._C._current_graph_task_id() != -1:
            self.function()
        return self.linear(x).tanh()


def test_two_checkpoints_that_run_again_at_once_leave_the_generators_alone() -> None:
    """The first begins, the second begins, the first ends, the second ends: where they can."""
    begun, joined, ended = threading.Event(), threading.Event(), threading.Event()

    def begin() -> None:
        begun.set()
        joined.wait(0.5)

    def join() -> None:
        joined.set()
        ended.wait(0.5)

    turns, runs = iter((bool, lambda: begun.wait(0.5))), iter((bool, join))
    first = Checkpointed(Again(begin), reentrant=False)
    second = Checkpointed(Again(lambda: next(runs)()), reentrant=False)
    layers = [nn.Linear(6, 6), Calling(ended.set), first, second, Calling(lambda: next(turns)())]
    model = nn.Sequential(*layers)
    options: dict[str, Any] = {"partition": [3, 2], "num_microbatches": 2}
    options |= {"loss": nn.functional.mse_loss, "schedule": penstock.schedules.one_f_one_b}
    options |= {"recompute": penstock.Recompute.NEVER}
    with penstock.Pipeline(model, **options) as pipe:
        pipe.train_step(torch.randn(4, 6), torch.randn(4, 6))
