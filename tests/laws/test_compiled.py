"""Compiled layers stay compiled in a pipeline, also where they draw random numbers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import penstock
from tests.models import Model, vectors
from tests.side_by_side import assert_trains_like_unsplit, pipeline
from tests.ways import WAYS, one_each

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit"),
    pytest.mark.filterwarnings("ignore:Guards may run slower"),  # on Python 3.13.0
]
"""Torch's own, while it compiles."""


class Block(nn.Module):  # a layer that draws
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(6, 6), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.linear(x)).tanh()


class Calls(nn.Module):  # calls a function in its forward, inside torch's checkpoint or not
    def __init__(self, function: Callable[[Tensor], Tensor], *, checkpointed: bool) -> None:
        super().__init__()
        self.function, self.checkpointed = function, checkpointed

    def forward(self, x: Tensor) -> Any:
        if not self.checkpointed:
            return self.function(x)
        return checkpoint(self.function, x, use_reentrant=False)


class Counting:  # a backend that runs graphs as they are, and counts the runs
    def __init__(self) -> None:
        self.runs = 0

    def __call__(self, graph: Any, example: Any) -> Callable[..., Any]:
        def run(*values: Any) -> Any:
            self.runs += 1
            return graph(*values)

        return run


def compiled_in_place(backend: Any) -> nn.Module:
    block = nn.Sequential(Block())
    block.compile(backend=backend)
    return block


def compiled_inside(backend: Any) -> nn.Module:
    return nn.Sequential(nn.Tanh(), torch.compile(Block(), backend=backend))  # type: ignore[call-overload]  # torch types it as a function


def function_compiled(backend: Any, *, checkpointed: bool = False) -> nn.Module:
    def function(x: Tensor) -> Tensor:
        return F.dropout(x, 0.3).cos()

    return Calls(torch.compile(function, backend=backend), checkpointed=checkpointed)


COMPILED = {
    "module.compile()": compiled_in_place,
    "a block in a layer": compiled_inside,
    "a function in a forward": function_compiled,
    "a function in a checkpoint": lambda backend: function_compiled(backend, checkpointed=True),
}


@pytest.fixture(autouse=True)
def nothing_compiled() -> None:
    torch.compiler.reset()


def layers(compiled: Callable[[Any], nn.Module], backend: Any) -> list[Any]:
    return [nn.Linear(6, 6), compiled(backend), Block(), compiled(backend), nn.Linear(6, 3)]


@pytest.mark.parametrize(
    "compiled, way", one_each([pytest.param(COMPILED[name], id=name) for name in COMPILED], WAYS)
)
def test_compiled_layers_that_draw_stay_compiled_and_equal_the_unsplit_model(
    compiled: Callable[[Any], nn.Module], way: dict[str, Any]
) -> None:
    backend = Counting()
    model = Model("compiled", lambda: layers(compiled, backend), vectors, F.mse_loss)
    assert_trains_like_unsplit(model, 6, partition=(2, 3), num_microbatches=3, **way)
    with pipeline(model, model.build(), partition=(2, 3), num_microbatches=3, **way) as pipe:
        for number, batch in enumerate(model.batches(6, 4)):
            backend.runs = 0
            pipe.train_step(*batch)
            assert backend.runs >= 6, f"step {number} ran uncompiled"


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_compiled_layers_that_draw_equal_the_compiled_unsplit_model(way: dict[str, Any]) -> None:
    model = Model("inductor", lambda: layers(compiled_inside, "inductor"), vectors, F.mse_loss)
    for num_stages in (1, 2):
        assert_trains_like_unsplit(model, 6, num_stages=num_stages, num_microbatches=3, **way)


@pytest.mark.parametrize("kind", [nn.Linear, Block])
def test_a_captured_block_is_compiled_where_it_is_without_a_pipeline(kind: Any) -> None:
    """Torch leaves some of its own modules as they are, by where they are written."""

    def runs(*, is_captured: bool) -> int:
        torch.compiler.reset()
        counting, block = Counting(), kind(6, 6) if kind is nn.Linear else kind()
        block.compile(backend=counting)
        model = nn.Sequential(nn.Linear(6, 6), block)
        if is_captured:
            penstock.capture(model, torch.ones(2, 6), check=False)
        counting.runs = 0
        block(torch.ones(2, 6))
        return counting.runs

    assert runs(is_captured=True) == runs(is_captured=False)
