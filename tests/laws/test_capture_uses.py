"""What a user does with a captured model beside training it: features, odd weights, keywords."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock import Pipeline
from tests.any_models.chain import Chain, inputs
from tests.capturing import loss


@pytest.mark.parametrize("num_stages", [1, 3])
def test_what_blocks_give_is_kept_beside_the_output(num_stages: int) -> None:
    model, x = Chain(), inputs(6)
    layers = penstock.capture(model, x, keep=["blocks.0", "blocks.1"])
    with Pipeline(
        layers, num_stages=num_stages, num_microbatches=3, loss=loss, threads_per_stage=1
    ) as pipe:
        output, features = pipe.eval_step(x)
        pipe.train_step(x, x)  # whose loss is given the output alone
    first = model.blocks[0](x)
    assert list(features) == ["blocks.0", "blocks.1"]
    assert torch.equal(features["blocks.0"], first)
    assert torch.equal(features["blocks.1"], model.blocks[1](first))
    assert torch.equal(output, model(x))


class InOrder(Chain):
    """Uses its keyword arguments in the order in which they are given."""

    def forward(self, **given: Tensor) -> Tensor:  # type: ignore[override]  # on purpose
        x = torch.zeros(())
        for block, value in zip(self.blocks, given.values(), strict=False):
            x = block(value + x)
        return x


def test_keyword_arguments_keep_their_order() -> None:
    x = inputs(4)
    given = {"second": x, "first": x * 2}
    found = penstock.capture(InOrder(), given, blocks=["blocks.0", "blocks.1"])
    assert "are the model's, to the bit" in str(found)


class Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.T @ x


class ByFunction(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return Through.apply(x, self.weight)


class SharedFunction(Chain):
    """Calls a block on two stages whose weight goes through a function of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0] = ByFunction(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for number in (0, 1, 0, 2):
            x = x + self.blocks[number](x).tanh()
        return x


class SparseWords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 4, sparse=True)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.words(x)
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("kind", [SharedFunction, SparseWords])
def test_gradients_of_weights_of_all_kinds_are_the_models(kind: type[nn.Module]) -> None:
    model = kind()
    whole = copy.deepcopy(model)
    x = torch.arange(8).view(4, 2) if kind is SparseWords else inputs(4)
    for part in x.split(2):
        (loss(whole(part), None) / 2).backward()
    with Pipeline(
        model, num_stages=3, num_microbatches=2, example_inputs=x, loss=loss, threads_per_stage=1
    ) as pipe:
        pipe.train_step(x, x)
    for mine, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        assert mine.grad is not None and theirs.grad is not None
        assert torch.equal(mine.grad.to_dense(), theirs.grad.to_dense())
