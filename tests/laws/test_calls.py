"""Calls of one pipeline: one at a time; copies are on their own; nothing is held afterwards."""

import copy
import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import penstock
from tests.distributed.launch import run_python
from tests.models import drawn
from tests.side_by_side import same_bits
from tests.ways import IN_ONE_PROCESS, WHOLE_STAGES

TRANSPORTS = pytest.mark.parametrize("transport", IN_ONE_PROCESS)


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(6, 6), nn.Tanh(), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 3)]


def pipeline(
    of: list[nn.Module],
    transport: penstock.Transport,
    recompute: penstock.Recompute = penstock.Recompute.STAGE,
) -> penstock.Pipeline:
    options: dict[str, Any] = {"recompute": recompute, "partition": (2, len(of) - 2)}
    options |= {"num_microbatches": 4, "loss": nn.MSELoss(), "transport": transport}
    options |= {"threads_per_stage": 1}
    return penstock.Pipeline(of, **options)


class Calls(nn.Module):  # call something in the forward
    def __init__(self) -> None:
        super().__init__()
        self.what: Any = lambda: None
        self.modes: list[bool] = []

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "training" and "modes" in self.__dict__:
            self.modes.append(value)
        super().__setattr__(name, value)

    def forward(self, x: Tensor) -> Tensor:
        self.what()
        return x


@pytest.mark.parametrize("again", ("train_step", "eval_step", "forward", "backward"))
@TRANSPORTS
def test_a_call_from_inside_a_call_is_refused(transport: penstock.Transport, again: str) -> None:
    inside, (x, y) = Calls(), drawn(8)
    with pipeline([*layers(), inside], transport) as pipe:
        outputs = pipe(x)
        calls = {
            "train_step": lambda: pipe.train_step(x, y),
            "eval_step": lambda: pipe.eval_step(x),
            "forward": lambda: pipe(x),
            "backward": lambda: outputs.sum().backward(),
        }
        inside.what = calls[again]
        with pytest.raises(penstock.PenstockError, match="running already") as caught:
            pipe.train_step(x, y)
        assert "stage 1" in caught.value.__notes__[0]
        inside.what = lambda: None
        pipe.train_step(x, y)  # the next call works


def test_a_checkpoint_around_a_pipeline_that_keeps_all_is_told_so() -> None:
    x, _ = drawn(8)
    how: dict[str, Any] = {"num_stages": 2, "transport": penstock.Transport.LOOPBACK}
    how |= {"num_microbatches": 1}
    keeps = penstock.Pipeline(layers(), recompute=penstock.Recompute.NEVER, **how)
    output = checkpoint(keeps, x, use_reentrant=False)
    with pytest.raises(penstock.PenstockError, match=r"torch\.utils\.checkpoint around the pipe"):
        output.sum().backward()
    keeps.zero_grad()
    checkpoint(keeps, x.requires_grad_(), use_reentrant=True).sum().backward()
    assert all(p.grad is not None for p in keeps.parameters())


def test_a_call_from_another_thread_is_refused() -> None:
    inside, (x, y) = Calls(), drawn(8)
    entered, leave = threading.Event(), threading.Event()

    def wait() -> None:
        entered.set()
        assert leave.wait(60)

    with pipeline([*layers(), inside], penstock.Transport.THREADS) as pipe:
        inside.what = wait
        first = threading.Thread(target=pipe.train_step, args=(x, y))
        first.start()
        assert entered.wait(60)
        with pytest.raises(penstock.PenstockError, match="running already"):
            pipe.eval_step(x)
        assert not inside.modes  # the running step has not seen the other mode
        leave.set()
        first.join()
        pipe.eval_step(x)


FORK = """
import os
from tests.laws.test_calls import *
x, y = drawn(8)
pipe = pipeline(layers(), penstock.Transport.THREADS)
outputs = pipe(x)
calls = {
    "train_step": lambda: pipe.train_step(x, y),
    "train_steps": lambda: pipe.train_steps([(x, y)], torch.optim.SGD(pipe.parameters(), 0.1)),
    "eval_step": lambda: pipe.eval_step(x),
    "forward": lambda: pipe(x),
    "backward": lambda: outputs.sum().backward(),
}
if os.fork() == 0:
    for name, call in calls.items():
        with pytest.raises(penstock.PenstockError, match="Make the pipeline in this process"):
            call()
        print("refused", name, flush=True)
    with pipeline(layers(), penstock.Transport.THREADS) as another:
        another.eval_step(x)
    os._exit(0)
assert os.wait()[1] == 0
pipe.train_step(x, y)  # as ever
"""


def test_a_call_in_a_child_that_was_forked_after_another_one_is_refused() -> None:
    ended = run_python("-c", FORK)
    assert ended.code == 0 and ended.output.count("refused") == 5, ended.output


@pytest.mark.parametrize("recompute", WHOLE_STAGES)
@TRANSPORTS
def test_a_pipeline_inside_a_layer_of_another_one_equals_its_layers(transport, recompute) -> None:
    def gradients(wrapped: bool) -> list[Tensor | None]:
        torch.manual_seed(3)
        inner: list[nn.Module] = [nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)]
        middle = penstock.Pipeline(
            inner, 2, transport=transport, threads_per_stage=1, num_microbatches=1
        )
        within = middle if wrapped else nn.Sequential(*inner)
        outer: list[nn.Module] = [nn.Linear(6, 6), within, nn.Linear(6, 3)]
        with pipeline(outer, transport, recompute) as pipe:
            pipe.train_step(*drawn(8))
        return [p.grad for layer in inner for p in layer.parameters()]

    for a, b in zip(gradients(wrapped=True), gradients(wrapped=False), strict=True):
        assert same_bits(a, b)


@TRANSPORTS
def test_a_copy_of_a_used_pipeline_trains_on_alone(transport: penstock.Transport) -> None:
    x, y = drawn(8)
    with pipeline(layers(), transport) as pipe:
        pipe.train_step(x, y)
        pipe.zero_grad()  # a copied parameter has no gradient
        twin = copy.deepcopy(pipe)
        with twin:
            assert same_bits(twin.train_step(x, y), pipe.train_step(x, y))
        for p, q in zip(pipe.parameters(), twin.parameters(), strict=True):
            assert p is not q and same_bits(p.grad, q.grad)
        assert pipe.state_dict().keys() == twin.state_dict().keys()


@contextmanager
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@TRANSPORTS
def test_the_batch_is_free_after_the_backward_though_the_loss_lives(transport: Any) -> None:
    x, y = drawn(8)
    with pipeline(layers(), transport) as pipe, no_collector():
        loss = F.mse_loss(pipe(x), y)
        loss.backward()
        gone = weakref.ref(x.untyped_storage())
        del x
        assert gone() is None and loss.isfinite()


class Fails(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("on purpose")


@TRANSPORTS
def test_a_failed_step_holds_nothing_once_its_error_is_dropped(transport: Any) -> None:
    seen: list[Any] = []

    class Notes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 2
            seen.append(weakref.ref(y))
            return y

    with pipeline([nn.Linear(6, 6), Notes(), Fails()], transport) as pipe, no_collector():
        try:
            pipe.train_step(*drawn(8))
        except ValueError as error:
            assert "stage 1" in error.__notes__[0]
        assert seen and all(reference() is None for reference in seen)


def test_a_gradient_of_a_gradient_in_a_forward_needs_the_kept_graph() -> None:
    class Slope(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with torch.enable_grad():
                v = x if x.requires_grad else x.detach().requires_grad_()
                (slope,) = torch.autograd.grad(v.pow(3).sum(), v, create_graph=True)
            return slope

    stack = [nn.Linear(6, 6), Slope(), nn.Linear(6, 3)]
    pipe = penstock.Pipeline(stack, 1, num_microbatches=2, loss=nn.MSELoss(), schedule="gpipe")
    with pipe, pytest.raises(penstock.errors.RecomputeError, match="in its own forward"):
        pipe.train_step(*drawn(8))
    with penstock.Pipeline(
        stack, 1, num_microbatches=2, loss=nn.MSELoss(), recompute=penstock.Recompute.NEVER
    ) as pipe:
        pipe.train_step(*drawn(8))
