"""Worker threads end: when closed, when collected, after faults and with the interpreter."""

import gc
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from tests.distributed.launch import run_python

NUM_STAGES = 3


def layers() -> list[nn.Module]:
    first = [nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)]
    return [*first, nn.Dropout(0.2), nn.Tanh(), nn.Linear(6, 6)]


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(9, 6), torch.randn(9, 6)


def make(modules: list[nn.Module], timeout_s: float = 60.0) -> penstock.Pipeline:
    options: dict[str, Any] = {"loss": F.mse_loss, "threads_per_stage": 1, "timeout_s": timeout_s}
    return penstock.Pipeline(modules, partition=(2, 2, 2), num_microbatches=4, **options)


def workers_since(before: set[threading.Thread]) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread not in before]


class Faulty(nn.Module):  # raise while `armed`
    armed = True

    def forward(self, x: Tensor) -> Tensor:
        if self.armed:
            raise ValueError("faulty")
        return x


@pytest.mark.parametrize("fail", (False, True))
def test_closing_leaves_no_threads(fail: bool) -> None:
    before, faulty = set(threading.enumerate()), Faulty()
    faulty.armed = False
    pipe = make([*layers()[:5], faulty])
    pipe.train_step(*batch())
    faulty.armed = fail
    if fail:
        with pytest.raises(ValueError, match="faulty"):
            pipe.train_step(*batch())
    assert len(workers_since(before)) >= NUM_STAGES - 1
    pipe.close()
    pipe.close()
    assert not workers_since(before)


def test_a_closed_pipeline_starts_again_when_used() -> None:
    before, pipe = set(threading.enumerate()), make(layers())
    for _ in range(3):
        assert torch.isfinite(pipe.train_step(*batch()))
        pipe.close()
    assert not workers_since(before)


@pytest.mark.parametrize("outstanding", (False, True))
def test_a_collected_pipeline_leaves_no_threads(outstanding: bool) -> None:
    before, pipe = set(threading.enumerate()), make(layers())
    pipe.train_step(*batch())
    output = pipe(batch()[0]) if outstanding else None
    del pipe, output
    gc.collect()
    for worker in workers_since(before):
        worker.join(10)
    assert not workers_since(before)


def test_many_faults_leave_no_threads_behind() -> None:
    before, faulty = set(threading.enumerate()), Faulty()
    with make([*layers()[:5], faulty]) as pipe:
        for _ in range(10):
            with pytest.raises(ValueError, match="faulty"):
                pipe.train_step(*batch())
        assert len(workers_since(before)) <= NUM_STAGES
        faulty.armed = False
        assert torch.isfinite(pipe.train_step(*batch()))
    assert not workers_since(before)


class Waiting(nn.Module):  # wait until it is let go
    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    def forward(self, x: Tensor) -> Tensor:
        self.go.wait(30)
        return x


def test_a_wait_beyond_the_deadline_says_who_waits_for_whom() -> None:
    waiting, before = Waiting(), set(threading.enumerate())
    pipe = make([*layers()[:3], waiting, *layers()[4:]], timeout_s=0.2)
    with pytest.raises(penstock.errors.WaitTimeout, match=r"stage \d.*stage \d"):
        pipe.train_step(*batch())
    waiting.go.set()
    pipe.zero_grad()
    assert torch.isfinite(pipe.train_step(*batch()))
    pipe.close()
    assert not workers_since(before)


def test_a_process_with_a_stuck_stage_ends_with_the_error_that_said_so() -> None:
    """The stage's operators wake again and again while the interpreter goes down."""
    program = (
        "import torch, penstock\nfrom torch import nn\n"
        "class Stuck(nn.Module):\n"
        "    def forward(self, x):\n"
        "        y = torch.ones(300, 300)\n"
        "        while True:\n"
        "            y = (y @ y).clamp(max=1)\n"
        "pipe = penstock.Pipeline([nn.Linear(2, 2), Stuck(), nn.Linear(2, 2)],\n"
        "    partition=[1, 1, 1], loss=nn.MSELoss(), timeout_s=0.1)\n"
        "pipe.train_step(torch.ones(4, 2), torch.ones(4, 2))\n"
    )
    ended = run_python("-c", program)
    assert "WaitTimeout: stage" in ended.output and "terminate" not in ended.output
    assert ended.code == 1


ENDINGS = {"pass": 0, "raise SystemExit(3)": 3, "raise ValueError('late')": 1, "out = pipe(x)": 0}


@pytest.mark.parametrize(
    "ending", ("pass", *(pytest.param(e, marks=pytest.mark.slow) for e in [*ENDINGS][1:]))
)
def test_the_interpreter_ends_without_close(ending: str) -> None:
    program = (
        "import torch, penstock\nfrom torch import nn\n"
        "pipe = penstock.Pipeline([nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)], num_stages=3,\n"
        "    num_microbatches=2, loss=nn.functional.mse_loss)\n"
        "x = torch.ones(4, 4)\nprint(pipe.train_step(x, x).shape)\n" + ending
    )
    ended = run_python("-c", program)
    assert ended.output.startswith("torch.Size([])\n") and ended.code == ENDINGS[ending]
    assert ended.code == 1 or ended.output == "torch.Size([])\n"
