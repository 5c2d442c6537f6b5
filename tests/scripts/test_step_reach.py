"""What a reader has to read of a step and of a plan does not grow unseen."""

import inspect
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import penstock
from tests.distributed.launch import run_python

MOST = {"step": (16, 4_000), "plan": (60, 11_560)}
"""Files and lines at most."""
MOST_FRAMES = 9
"""Penstock's functions on the stack of a worker thread while a layer runs."""


@pytest.mark.parametrize("call", MOST)
def test_what_a_call_enters_does_not_grow(call: str) -> None:
    """In a process of its own: what is remembered from other calls is not entered again."""
    said = run_python("-m", "scripts.step_reach", call).output
    files, _, lines, *_ = said.splitlines()[-1].replace(",", "").split()
    most_files, most_lines = MOST[call]
    assert int(files) <= most_files, said
    assert int(lines) <= most_lines, said


class _NotesItsStack(nn.Linear):
    """A layer that notes which of Penstock's functions are around its forward."""

    def forward(self, x: Tensor) -> Tensor:
        folder = str(Path(penstock.__file__).parent)
        self.stack = [f.function for f in inspect.stack(0) if f.filename.startswith(folder)]
        return super().forward(x)


def test_a_layer_is_few_frames_away_from_its_worker_thread() -> None:
    layers = [_NotesItsStack(4, 4), _NotesItsStack(4, 4)]
    with penstock.Pipeline(layers, num_stages=2, loss=nn.functional.mse_loss) as pipe:
        for _ in range(3):  # the first two also look at how layers draw
            pipe.train_step(torch.randn(2, 4), torch.randn(2, 4))
    for layer in layers:
        assert layer.stack[-1] == "_serve"
        assert len(layer.stack) <= MOST_FRAMES, layer.stack
