"""Models whose training and evaluation differ in what they call, and gradients between blocks."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock import Recompute
from penstock.model.capture.captured import record_model
from tests.model.capture.any_models.chain import Chain, inputs
from tests.model.capture.running import assert_trains_as_whole


class OnlyInEvaluation(Chain):  # leaves out all blocks in training
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if self.training else super().forward(x)


class OnlyInTraining(Chain):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.training else x * 2


@pytest.mark.parametrize("kind", [OnlyInEvaluation, OnlyInTraining])
def test_blocks_that_one_mode_leaves_out_are_found_in_another(kind: type[Chain]) -> None:
    model = kind()
    whole = copy.deepcopy(model).eval()
    assert record_model(model, inputs()).calls == tuple((f"blocks.{n}", 0) for n in range(3))
    with penstock.Pipeline(
        model, num_stages=2, num_microbatches=1, example_inputs=inputs(), loss=nn.MSELoss()
    ) as pipe:
        assert torch.equal(pipe.eval_step(inputs()), whole(inputs()))


class Penalised(Chain):
    """Adds, between its blocks, the gradient of a penalty on a value that is cut off."""

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == 1:
                with torch.enable_grad():
                    apart = x.detach().requires_grad_()
                    (gradient,) = torch.autograd.grad(apart.square().sum(), apart)
                x = x + gradient
        return x


@pytest.mark.parametrize(
    "recompute", [Recompute.NEVER, Recompute.STAGE, Recompute.layers(1)], ids=str
)
@pytest.mark.parametrize("partition", [[2, 1], [1, 2]])
def test_gradients_between_blocks_are_computed_whatever_is_recomputed(
    recompute: Any, partition: list[int]
) -> None:
    assert_trains_as_whole(Penalised(), inputs(), partition=partition, recompute=recompute)
