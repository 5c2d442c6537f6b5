"""The fallback, torch.export: the model's bits where it works; refused where it is not."""

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.errors import CheckError, CutError, ExportWarning, GlueError
from tests.model.capture.any_models.lists import REQUIRED
from tests.model.capture.any_models.made import AnyModel
from tests.model.capture.running import BATCH, MICROBATCHES, assert_equal, gradients, loss

BY_NAME = {model.name: model for model in REQUIRED}
FEW = ("unet", "bert")
MORE = ("gpt2", "llama, tied", "mixtral", "t5", "vit", "whisper", "mamba", "resnet", "swin")
WITH_CACHE = ("gpt2", "llama, tied", "mixtral")
EVERY = [*FEW, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)]


def same_kernels(name: str, model: Any) -> None:
    """Let a model compute alike when it is traced: other kernels round differently."""
    if name in WITH_CACHE:  # no mask is made for torch's fused attention, but where it is traced
        model.set_attn_implementation("eager")
    if name == "mixtral":
        model.set_experts_implementation("batched_mm")


def without_cache(model: AnyModel, batch: int) -> Any:
    inputs = model.make()[1](batch)
    return {**inputs, "use_cache": False} if model.name in WITH_CACHE else inputs


@pytest.mark.parametrize("name", EVERY)
def test_an_exported_model_trains_as_the_model_itself(name: str) -> None:
    model, _ = BY_NAME[name].make()
    same_kernels(name, model)
    inputs = without_cache(BY_NAME[name], BATCH)
    whole = copy.deepcopy(model.eval())
    with pytest.warns(ExportWarning, match=r"was exported: branches and loops on values"):
        layers = penstock.capture(model, inputs, method="export")
    rerun = penstock.capture(whole, inputs)
    assert {name for name, _ in layers.holders()[0][1].named_parameters()} == {
        name for name, _ in model.named_parameters()
    }
    for captured in (layers, rerun):
        with penstock.Pipeline(
            captured,
            num_stages=3,
            num_microbatches=MICROBATCHES,
            loss=loss,
            threads_per_stage=1,
        ) as pipe:
            for batch in (BATCH, 2):
                pipe.train_step(without_cache(BY_NAME[name], batch), torch.zeros(batch))
    assert_equal(gradients(model), gradients(whole))


class Halved(torch.autograd.Function):
    """Its backward is not that of its forward, as in quantisation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.between(block(x))
        return x

    def between(self, x: Tensor) -> Tensor:
        return x.tanh()


class OwnFunction(Chain):
    def between(self, x: Tensor) -> Tensor:
        return Halved.apply(x)


def doubled(x: Tensor) -> Tensor:
    return x.tanh() * 2


with warnings.catch_warnings():
    # torch advises against scripts, by one category or another; they are still met in models
    warnings.filterwarnings("ignore", ".torch.jit.script. is (deprecated|not supported)")
    compiled = torch.jit.script(doubled)


class Compiled(Chain):
    """Cannot be followed from outside: a script runs below what ghosts see."""

    def between(self, x: Tensor) -> Tensor:
        return compiled(x)


class Mapped(Chain):
    """Cannot be exported either."""

    def between(self, x: Tensor) -> Tensor:
        return torch.vmap(torch.tanh)(x)


class Deciding(Chain):
    def between(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


def test_what_cannot_be_followed_can_be_exported() -> None:
    model = Compiled()
    whole = copy.deepcopy(model)
    x = torch.randn(4, 4)
    with pytest.raises(GlueError, match=r"inside jit\.script, vmap"):
        penstock.capture(model, x)
    model.blocks[1].register_forward_hook(lambda *_: None)
    with pytest.warns(ExportWarning, match=r"the hooks of 'blocks\.1' do not run"):
        layers = penstock.capture(model, x, method="export")
    assert [step.name for step in layers] == ["blocks.0", "blocks.1", "blocks.2"]
    whole(x).square().mean().backward()
    with penstock.Pipeline(
        layers, num_stages=3, loss=lambda y, _: y.square().mean(), threads_per_stage=1
    ) as pipe:
        pipe.train_step(x)
        assert pipe.eval_step(x[:1]).shape == (1, 4)
    for mine, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)  # a script's formulas round otherwise


def test_an_export_that_is_not_the_model_is_refused() -> None:
    with pytest.raises(CheckError, match=r"the gradient of 'blocks\.0\.weight' differs by"):
        penstock.capture(OwnFunction(), torch.randn(4, 4), method="export", check=False)
    with pytest.raises(GlueError, match=r"torch\.export cannot follow Deciding either"):
        penstock.capture(Deciding(), torch.randn(4, 4), method="export")
    with pytest.raises(GlueError, match=r"what torch\.export made of the model does not run"):
        penstock.capture(Mapped(), torch.randn(4, 4), method="export")
    with pytest.raises(CutError, match="method='trace'; choose 'rerun' or 'export'"):
        penstock.capture(Chain(), torch.randn(4, 4), method="trace")
