"""Guards: each is asked only where it has something to watch, and only for what it watches."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.runtime.stage.guards import inside
from scripts.step_reach import functions_entered

WATCHERS = {"batch_norm", "boundary", "drawing", "kept_bytes", "state", "streams"}
"""Files of `runtime/` that a plain step has no need of."""


class Counting(nn.Module):
    """A layer that counts its calls in a buffer."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self.calls


def entered(*middle: nn.Module, **settings: Any) -> set[str]:
    """Return the files of `runtime/` that the second step of a pipeline enters."""

    def make_step() -> Callable[[], object]:
        layers = [nn.Linear(8, 8), *middle, nn.Linear(8, 8)]
        pipe = penstock.Pipeline(
            layers, num_stages=2, num_microbatches=2, loss=nn.functional.mse_loss, **settings
        )
        x = torch.randn(4, 8)
        return lambda: pipe.train_step(x, x)

    paths = {Path(code.co_filename) for code in functions_entered(make_step)}
    return {path.stem for path in paths if "runtime" in path.parts}


def test_a_plain_step_enters_no_watcher_that_it_does_not_need() -> None:
    assert entered() & WATCHERS == set()


@pytest.mark.parametrize(
    ("layer", "watchers"),
    [
        (nn.BatchNorm1d(8), {"batch_norm"}),
        (nn.Dropout(0.5), {"drawing", "streams"}),
        (Counting(), {"state"}),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_a_step_enters_the_watchers_of_its_layers(layer: nn.Module, watchers: set[str]) -> None:
    assert watchers <= entered(layer)


def test_a_step_that_traces_memory_counts_what_stages_keep() -> None:
    assert "kept_bytes" in entered(trace=penstock.Trace.MEMORY)


@contextmanager
def noting(name: str, notes: list[str]) -> Iterator[None]:
    """Note when something is run inside."""
    notes.append(f"{name} begins")
    yield
    notes.append(f"{name} ends")


def test_the_first_context_is_the_outermost_and_none_is_nothing() -> None:
    notes: list[str] = []
    contexts = [noting("a", notes), None, noting("b", notes)]
    with inside(contexts):
        notes.append("autograd")
    assert notes == ["a begins", "b begins", "autograd", "b ends", "a ends"]
