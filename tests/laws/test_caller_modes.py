"""What the calling thread is under applies to every stage, or the call stays in that thread."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks, save_on_cpu, saved_tensors_hooks
from torch.profiler import profile
from torch.utils.flop_counter import FlopCounterMode

import penstock
from penstock.errors import ConfigError, ExecutionWarning
from tests.model_parts import Does
from tests.models import drawn
from tests.side_by_side import same_bits
from tests.ways import IN_ONE_PROCESS, WHOLE_STAGES

THREADS, LOOPBACK = IN_ONE_PROCESS
RECOMPUTE = pytest.mark.parametrize("recompute", penstock.Recompute)


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3)]


def pipeline(of: list[nn.Module], **way: Any) -> penstock.Pipeline:
    return penstock.Pipeline(
        of, 2, num_microbatches=4, loss=F.mse_loss, threads_per_stage=1, **way
    )


class Functions(torch.overrides.TorchFunctionMode):  # counts calls of linear
    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is F.linear
        return func(*args, **(kwargs or {}))


def flops() -> tuple[AbstractContextManager[Any], Callable[[], int]]:
    mode = FlopCounterMode(display=False)
    return mode, mode.get_total_flops


def functions() -> tuple[AbstractContextManager[Any], Callable[[], int]]:
    mode = Functions()
    return mode, lambda: mode.count


def saved() -> tuple[AbstractContextManager[Any], Callable[[], int]]:
    packed: list[None] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(None)
        return tensor

    return saved_tensors_hooks(pack, lambda tensor: tensor), lambda: len(packed)


def on_cpu() -> tuple[AbstractContextManager[Any], Callable[[], int]]:
    mode = save_on_cpu()
    pack = mode.pack_hook
    packed: list[None] = []

    def counted(tensor: Tensor) -> Any:
        packed.append(None)
        return pack(tensor)

    mode.pack_hook = counted
    return mode, lambda: len(packed)


def profiled() -> tuple[AbstractContextManager[Any], Callable[[], int]]:
    recorder, name = profile(acc_events=True), "aten::addmm"
    return recorder, lambda: sum(e.count for e in recorder.key_averages() if e.key == name)


MODES = pytest.mark.parametrize("made", (flops, functions, saved, on_cpu, profiled))


@MODES
def test_modes_count_what_they_count_of_the_unsplit_model(made: Callable[[], Any]) -> None:
    x, y = drawn(8)
    mode, unsplit_count = made()
    unsplit = layers()
    with mode:
        for piece, target in zip(x.split(2), y.split(2), strict=True):
            (F.mse_loss(nn.Sequential(*unsplit)(piece), target) * 0.25).backward()
    mode, count = made()
    built = layers()
    with pipeline(built, recompute=penstock.Recompute.NEVER) as pipe:
        pipe.train_step(x, y)
        pipe.zero_grad()
        with mode, pytest.warns(ExecutionWarning, match="calling thread only"):
            pipe.train_step(x, y)
    assert count() == unsplit_count() > 0
    ours, wanted = nn.ModuleList(built).parameters(), nn.ModuleList(unsplit).parameters()
    pairs = zip(ours, wanted, strict=True)
    assert all(same_bits(a.grad, b.grad) for a, b in pairs)


@RECOMPUTE
@MODES
def test_modes_change_no_bit_and_leave_no_trace(made: Any, recompute: penstock.Recompute) -> None:
    x, y = drawn(8)
    gradients = []
    for mode in (None, made()[0]):
        built = layers()
        pipe = pipeline(built, recompute=recompute)
        if mode is not None:
            with mode, pytest.warns(ExecutionWarning):
                pipe.train_step(x, y)
            with pytest.warns(ExecutionWarning), made()[0]:
                pipe(x).sum().backward()
            pipe.zero_grad()
            pipe.step = 0
        pipe.train_step(x, y)
        pipe.close()
        gradients.append([p.grad for layer in built for p in layer.parameters()])
    assert all(same_bits(a, b) for a, b in zip(*gradients, strict=True))


_in_thread = threading.local()
_in_context = ContextVar("in_context", default=0.0)


class ReadsThreadLocal(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * _in_thread.factor


def notes_of(layer: nn.Module, transport: penstock.Transport) -> str:
    pipe = pipeline([nn.Linear(6, 3), layer], transport=transport)
    with pipe, pytest.raises(AttributeError) as caught:
        pipe.train_step(*drawn(8))
    return " ".join(caught.value.__notes__)


def test_a_thread_local_that_a_worker_lacks_is_explained() -> None:
    _in_thread.factor = 2.0
    notes = notes_of(ReadsThreadLocal(), THREADS)
    assert "what the caller set is not there. Use a contextvars.ContextVar" in notes
    token = _in_context.set(2.0)
    losses = []
    for layer, transport in (
        (ReadsThreadLocal(), LOOPBACK),
        (Does(lambda x: x * _in_context.get()), THREADS),
    ):
        with pipeline([*layers(), layer], transport=transport) as pipe:
            losses.append(pipe.train_step(*drawn(8)))
    assert same_bits(*losses)
    _in_context.reset(token)
    del _in_thread.factor
    assert "ContextVar" not in notes_of(ReadsThreadLocal(), LOOPBACK)


def test_other_missing_attributes_are_not_about_threads() -> None:
    assert "ContextVar" not in notes_of(Does(lambda x: x * SimpleNamespace().factor), THREADS)


@pytest.mark.parametrize("recompute", WHOLE_STAGES)
def test_loop_back_is_under_save_on_cpu_without_a_word(recompute: penstock.Recompute) -> None:
    gradients = []
    mode, count = on_cpu()
    for around in (nullcontext(), mode):
        built = layers()
        with pipeline(built, recompute=recompute, transport=LOOPBACK) as pipe, around:
            pipe.train_step(*drawn(8))
        gradients.append([p.grad for layer in built for p in layer.parameters()])
    assert all(same_bits(a, b) for a, b in zip(*gradients, strict=True)) and count()


class Hooked(nn.Module):  # save what autograd saves through hooks
    def forward(self, x: Tensor) -> Tensor:
        with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            return x.tanh()


@pytest.mark.parametrize("transport", IN_ONE_PROCESS)
def test_disabled_hooks_stay_disabled_and_what_needs_them_is_refused(transport: Any) -> None:
    def disabled() -> AbstractContextManager[None]:
        return disable_saved_tensors_hooks("no hooks here")

    never = {"recompute": penstock.Recompute.NEVER, "transport": transport}
    needing = ({"transport": transport}, {**never, "trace": penstock.Trace.MEMORY})
    for options in needing:
        with pipeline(layers(), **options) as pipe:
            with disabled(), pytest.raises(ConfigError, match=r"'no hooks here'.*Recompute.NEVER"):
                pipe.train_step(*drawn(8))
            pipe.train_step(*drawn(8))
    with pipeline(layers(), **never) as pipe, disabled():
        pipe.train_step(*drawn(8))
    with pipeline([*layers(), Hooked()], **never) as pipe:
        with disabled(), pytest.raises(RuntimeError, match="no hooks here"):
            pipe.train_step(*drawn(8))
        pipe.train_step(*drawn(8))


class Notes(nn.Module):  # notes what a new tensor is like, and what becomes of a denormal number
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, bool]] = []

    def forward(self, x: Tensor) -> Tensor:
        tiny = torch.full((1,), 1e-310, dtype=torch.float64, device="cpu")
        self.seen.append((torch.empty(1).device.type, bool(tiny * 1 == 0)))
        return x


@pytest.mark.parametrize("transport", IN_ONE_PROCESS)
def test_the_default_device_and_flushing_reach_every_stage(transport: penstock.Transport) -> None:
    first, last, (x, y) = Notes(), Notes(), drawn(8)
    with pipeline([first, *layers(), last], transport=transport) as pipe:
        pipe.train_step(x, y)
        assert set(first.seen) == set(last.seen) == {("cpu", False)}
        first.seen, last.seen = [], []
        flushes = torch.set_flush_denormal(True)
        try:
            with torch.device("meta"):
                pipe.train_step(x, y)
        finally:
            torch.set_flush_denormal(False)
        assert set(first.seen) == set(last.seen) == {("meta", flushes)}
        first.seen, last.seen = [], []
        pipe.train_step(x, y)
        assert set(first.seen) == set(last.seen) == {("cpu", False)}
