"""The known limits of captured models: what is refused, and what can do no harm."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.errors import CutError, RouteError
from penstock.model.capture.captured import record_model
from penstock.model.capture.stages import CutModel
from penstock.model.capture.tied_weights import release
from tests.model.capture.any_models.chain import WIDTH, Chain, inputs
from tests.model.capture.running import assert_trains_as_whole
from tests.model.capture.test_errors import pipeline


class CatchingAll(Chain):  # catches whatever a block raises, and goes on
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            try:
                x = block(x)
            except BaseException:
                x = x * 0
        return x


class CatchingTheLast(Chain):  # gives something else where a block raises
    def forward(self, x: Tensor) -> Tensor:
        try:
            return self.blocks[2](self.blocks[1](self.blocks[0](x)))
        except BaseException:
            return torch.zeros(1)


def test_code_that_catches_everything_cannot_change_what_is_computed() -> None:
    assert_trains_as_whole(CatchingAll(), inputs(), check=False)
    pipe = pipeline(CatchingTheLast())
    with pipe, pytest.raises(CutError, match=r"caught the exception by which a stage leaves"):
        pipe.train_step(inputs(), inputs())


def test_a_model_that_is_compiled_as_a_whole_is_refused() -> None:
    compiled = Chain()
    compiled.compile(backend="eager")
    wrapped: Any = torch.compile(Chain(), backend="eager")
    for model in (compiled, wrapped):
        with pytest.raises(CutError, match=r"is compiled; give the model as it was"):
            penstock.capture(model, inputs())


def test_a_block_may_have_a_hook_on_its_gradients() -> None:
    model = Chain()
    model.blocks[1].register_full_backward_hook(lambda *_: None)
    record_model(model, inputs())


def test_a_parameter_that_only_another_stage_has_is_not_read_as_it_lies_there() -> None:
    class Sometimes(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.extra = nn.Parameter(torch.ones(WIDTH))

        def between(self, x: Tensor, number: int) -> Tensor:
            if number == 1 and x.shape[0] > 3:
                x = x.clone()
                x[0] = self.extra
            return x

    model = Sometimes()
    cut = CutModel(record_model(model, inputs(3)), (1, 2))
    first = cut.run_stage(0, ((inputs(4),), {}), {})
    release(model, cut.names_of(1))
    with pytest.raises(RouteError, match=r"the parameter 'extra' is read \(test_limits"):
        cut.run_stage(1, ((), {}), first.sent[1], first.told)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # of what compiles
def test_blocks_may_be_compiled() -> None:
    class Transposed(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight.T

    model = Chain()
    model.blocks = nn.ModuleList(Transposed(WIDTH, WIDTH) for _ in range(3))
    model.blocks[0].compile(backend="eager")
    compiled: Any = torch.compile(model.blocks[1], backend="eager")
    model.blocks[1] = compiled
    assert "to the bit" in str(penstock.capture(model, inputs()))


class KeptForGeneration(Chain):
    """Keeps a tensor that its training does not read, as Qwen2.5-VL of transformers does."""

    def __init__(self) -> None:
        super().__init__()
        self.deltas: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.training or self.deltas is None or len(x):
            self.deltas = x.sum(1)
        return super().forward(x)


def test_what_only_generation_reads_can_be_forgotten_as_the_refusal_says() -> None:
    model = KeptForGeneration()
    with pytest.raises(CutError, match="and it is no block") as refusal:
        penstock.capture(model, inputs(4))
    exec(str(refusal.value).rpartition("forget it: ")[2], {"model": model})
    assert "are the model's, to the bit" in str(penstock.capture(model, inputs(4)))
