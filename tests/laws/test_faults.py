"""A fault on any stage reaches the caller as itself, names its place, and leaves all working."""

import itertools
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from penstock.runtime import workers
from penstock.runtime.run import Run
from tests.every_schedule import EVERY_SCHEDULE
from tests.reference import Unsplit, chain
from tests.side_by_side import differences
from tests.ways import IN_ONE_PROCESS, in_turns

NUM_STAGES, NUM_MICROBATCHES = 3, 4


class Fault(RuntimeError):
    """What the user's code raises; its two arguments cannot be rebuilt from its message."""

    def __init__(self, where: str, number: int) -> None:
        super().__init__(f"{where} {number}")
        self.where, self.number = where, number


class Faulty(nn.Module):
    """Raise in the forward or the backward of a chosen call, counted from 1 since `arm`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.arm("", 0)

    def arm(self, where: str, call: int) -> None:
        """Choose where to raise; ("", 0) for nowhere."""
        self.where, self.call, self.calls = where, call, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.where == "forward" and self.calls == self.call:
            raise Fault("forward", self.calls)
        return _Backward.apply(self.linear(x), self)


class _Backward(torch.autograd.Function):
    """The identity, whose backward raises when its layer is armed so."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Faulty) -> Tensor:
        ctx.layer = layer
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        layer = ctx.layer
        if layer.where == "backward":
            layer.call -= 1
            if layer.call == 0:
                raise Fault("backward", 0)
        return gradient, None


def build() -> list[nn.Module]:
    """Give six layers, faulty ones on each of three stages, dropout and BatchNorm between."""
    torch.manual_seed(0)
    return [Faulty(), nn.BatchNorm1d(6), Faulty(), nn.Dropout(0.2), nn.Tanh(), Faulty()]


def faulty_in(layers: list[nn.Module], number: int) -> Faulty:
    layer = layers[number]
    assert isinstance(layer, Faulty)
    return layer


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(9, 6, generator=generator), torch.randn(9, 6, generator=generator)


class Loss:  # the mean squared error, which raises on a chosen call
    def __init__(self) -> None:
        self.fail_at = 0

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        self.fail_at -= 1
        if self.fail_at == 0:
            raise Fault("loss", 0)
        return F.mse_loss(output, target)


def make(layers: list[nn.Module], loss: Any, **way: Any) -> penstock.Pipeline:
    options: dict[str, Any] = {"loss": loss, "threads_per_stage": 1}
    return penstock.Pipeline(
        layers, partition=(2, 2, 2), num_microbatches=NUM_MICROBATCHES, **way, **options
    )


def assert_works(pipe: penstock.Pipeline, layers: list[nn.Module]) -> None:
    """Check that a step after the fault gives the unsplit gradients, once they are zeroed."""
    pipe.zero_grad()
    twin = build()
    for module, copy in zip(layers, twin, strict=True):
        copy.load_state_dict(module.state_dict())
    unsplit = Unsplit(twin, chain(6), NUM_MICROBATCHES, step=pipe.step)
    assert torch.equal(pipe.train_step(*batch()), unsplit.train_step(*batch(), F.mse_loss))
    assert not differences(layers, twin)


def told(error: BaseException) -> str:
    return " ".join(getattr(error, "__notes__", []))


@pytest.mark.parametrize(
    "where, stage, microbatch, way",
    in_turns(("forward", "backward"), range(NUM_STAGES), (0, 2, 3)),
)
def test_a_fault_in_a_layer(where: str, stage: int, microbatch: int, way: dict[str, Any]) -> None:
    layers, number = build(), (0, 2, 5)[stage]
    faulty = faulty_in(layers, number)
    recomputed = way["recompute"] is penstock.Recompute.STAGE
    with make(layers, F.mse_loss, **way) as pipe:
        pipe.train_step(*batch())
        call = microbatch + 1
        if where == "forward" and recomputed and way["schedule"] is not EVERY_SCHEDULE[0]:
            call = 1  # recomputes come between the forwards here, so only the first call is sure
        faulty.arm(where, call)
        with pytest.raises(Fault, match=where) as caught:
            pipe.train_step(*batch())
        assert type(caught.value) is Fault and f"stage {stage}" in told(caught.value)
        assert f"micro-batch {call - 1}" in told(caught.value)
        assert f"'{number}'" in told(caught.value) and "Faulty" in told(caught.value)
        faulty.arm("", 0)
        assert_works(pipe, layers)


@pytest.mark.parametrize("call, way", in_turns((1, 4)))
def test_a_fault_in_the_loss(call: int, way: dict[str, Any]) -> None:
    layers, loss = build(), Loss()
    with make(layers, loss, **way) as pipe:
        loss.fail_at = call
        with pytest.raises(Fault, match="loss") as caught:
            pipe.train_step(*batch())
        assert f"stage {NUM_STAGES - 1}" in told(caught.value) and "loss" in told(caught.value)
        assert_works(pipe, layers)


@pytest.mark.parametrize("stage", range(NUM_STAGES))
@pytest.mark.parametrize("transport", IN_ONE_PROCESS)
def test_a_fault_in_a_recompute(stage: int, transport: penstock.Transport) -> None:
    layers, number = build(), (0, 2, 5)[stage]
    faulty = faulty_in(layers, number)
    with make(layers, F.mse_loss, transport=transport) as pipe:
        for _ in range(2):
            faulty.arm(
                "forward", NUM_MICROBATCHES + 2
            )  # GPipe: all forwards first, then recomputes
            with pytest.raises(Fault) as caught:
                pipe.train_step(*batch())
                pipe.train_step(
                    *batch()
                )  # where a stage recomputes one less, the next step raises
            assert f"stage {stage}" in told(caught.value)
            assert f"'{number}'" in told(caught.value) and "micro-batch" in told(caught.value)
        faulty.arm("", 0)
        assert_works(pipe, layers)


@pytest.mark.parametrize("way", in_turns())
def test_faults_in_the_module_form_and_in_evaluation(way: dict[str, Any]) -> None:
    layers = build()
    faulty = faulty_in(layers, 2)
    x, y = batch()
    with make(layers, F.mse_loss, **way) as pipe:
        faulty.arm("forward", 2)
        with pytest.raises(Fault) as caught:
            pipe.eval_step(x)
        assert "stage 1" in told(caught.value)
        assert all(module.training for module in pipe.modules())
        faulty.arm("forward", 2)
        with pytest.raises(Fault) as caught:
            pipe(x)
        assert "stage 1" in told(caught.value)
        faulty.arm("backward", 2)
        loss = F.mse_loss(pipe(x), y)
        with pytest.raises(Fault) as caught:
            loss.backward()
        assert "stage 1" in told(caught.value) and "micro-batch 1" in told(caught.value)
        faulty.arm("", 0)
        assert_works(pipe, layers)


@pytest.mark.parametrize("where", ("forward", "backward"))
@pytest.mark.parametrize("transport", IN_ONE_PROCESS)
def test_a_fault_in_the_very_first_step_of_a_balanced_pipeline(where: Any, transport: Any) -> None:
    layers = build()
    before = [b.clone() for b in nn.ModuleList(layers).buffers()]
    faulty = faulty_in(layers, 5)
    faulty.arm(where, 1)
    options: dict[str, Any] = {"loss": F.mse_loss, "threads_per_stage": 1, "transport": transport}
    with penstock.Pipeline(
        layers, num_stages=3, num_microbatches=NUM_MICROBATCHES, **options
    ) as pipe:
        with pytest.raises(Fault, match=where) as caught:
            pipe.train_step(*batch())
        assert "'5'" in told(caught.value)
        moved = [
            not torch.equal(a, b)
            for a, b in zip(before, nn.ModuleList(layers).buffers(), strict=True)
        ]
        assert moved == [False] * 3 or pipe.step == 1  # what was measured leaves no trace
        faulty.arm("", 0)
        assert_works(pipe, layers)


class Raising(nn.Module):  # raise what it is given
    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    def forward(self, x: Tensor) -> Tensor:
        raise self.error


@pytest.mark.parametrize(
    "error, way", in_turns((StopIteration("end"), KeyError("key"), GeneratorExit()))
)
def test_what_is_raised_arrives_as_the_very_same_object(error: BaseException, way: Any) -> None:
    layers = [*build()[:5], Raising(error)]
    with make(layers, F.mse_loss, **way) as pipe:
        with pytest.raises(type(error)) as caught:
            pipe.train_step(*batch())
        assert caught.value is error


class Interrupted(nn.Module):  # raise what is no Exception
    armed = False

    def forward(self, x: Tensor) -> Tensor:
        if self.armed:
            raise KeyboardInterrupt
        return x


@pytest.mark.parametrize("transport", IN_ONE_PROCESS)
def test_an_interrupt_reaches_the_caller_too(transport: penstock.Transport) -> None:
    layers = [*build()[:5], Interrupted()]
    with make(layers, F.mse_loss, transport=transport) as pipe:
        Interrupted.armed = True
        with pytest.raises(KeyboardInterrupt):
            pipe.train_step(*batch())
        Interrupted.armed = False
        assert torch.isfinite(pipe.train_step(*batch()))


def raise_at(line: int, file: str) -> Callable[[FrameType, str, Any], Any]:
    """Make a trace function that raises before the given line that this thread runs of a file,
    counted from 1.
    """
    lines = itertools.count(1)

    def in_file(frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line" and next(lines) == line:
            raise KeyboardInterrupt
        return in_file

    return lambda frame, event, arg: in_file if frame.f_code.co_filename == file else None


@pytest.mark.parametrize("what", ("first step", "step", "close"))
def test_an_interrupt_at_any_line_of_the_worker_threads_hangs_nothing(what: str) -> None:
    layers: list[nn.Module] = [nn.Linear(6, 6) for _ in range(6)]
    with make(layers, F.mse_loss, transport=penstock.Transport.THREADS) as pipe:
        loss = pipe.train_step(*batch())
        for line in itertools.count(1):
            if what == "first step":
                pipe.close()
            sys.settrace(raise_at(line, workers.__file__))
            try:
                pipe.close() if what == "close" else pipe.train_step(*batch())
                break
            except KeyboardInterrupt:
                continue
            finally:
                sys.settrace(None)
                pipe.zero_grad()
                assert torch.equal(pipe.train_step(*batch()), loss), line
        assert line > (5 if what == "close" else 20)


class Held(nn.Module):  # the identity, once the gate is open
    gate = threading.Event()

    def forward(self, x: Tensor) -> Tensor:
        self.gate.wait()
        return x


def test_a_second_interrupt_leaves_nobody_who_adds_to_later_gradients(monkeypatch: Any) -> None:
    def interrupted(_: Any, crew: Any, jobs: Any, *others: Any) -> None:
        crew.hand_out(jobs)
        raise KeyboardInterrupt

    def again(*_: Any) -> None:
        monkeypatch.undo()
        raise SystemExit(3)

    layers = [Held(), *(nn.Linear(6, 6) for _ in range(5))]
    with make(layers, F.mse_loss, transport=penstock.Transport.THREADS) as pipe:
        others = set(threading.enumerate())
        Held.gate.set()
        loss = pipe.train_step(*batch())
        running = set(threading.enumerate()) - others
        Held.gate.clear()
        monkeypatch.setattr(workers.ThreadDriver, "_run", interrupted)
        monkeypatch.setattr(Run, "fail", again)
        with pytest.raises(SystemExit):
            pipe.train_step(*batch())
        pipe.zero_grad()
        Held.gate.set()
        for thread in running:
            thread.join()
        assert all(parameter.grad is None for parameter in pipe.parameters())
        assert torch.equal(pipe.train_step(*batch()), loss)
