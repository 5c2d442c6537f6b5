"""What a model is captured with, and how it must run: a remedy where it cannot."""

from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock import Pipeline
from penstock.errors import BatchError, CutError, RecomputeError
from penstock.torch_private import fake_tensors
from tests.model.capture.any_models.chain import WIDTH, Chain, inputs, of_blocks


class Force(nn.Linear):  # returns a gradient of what it computes
    def forward(self, x: Tensor) -> Tensor:
        x = x if x.requires_grad else x.detach().requires_grad_()
        energy = super().forward(x).tanh().sum()
        return torch.autograd.grad(energy, x, create_graph=True)[0]


class ForceAnywhere(Force):
    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            return super().forward(x)


class Asserting(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        assert torch.is_grad_enabled(), "no gradients"
        return super().forward(x)


@pytest.mark.parametrize("kind", [Force, Asserting])
def test_a_model_that_needs_gradients_in_evaluation_is_told_what_to_do(kind: Any) -> None:
    message = r"Made runs with gradients and not without.*torch\.enable_grad\(\)"
    with pytest.raises(CutError, match=message):
        penstock.capture(of_blocks(kind), inputs())


def test_what_it_is_told_to_do_helps() -> None:
    layers = penstock.capture(of_blocks(ForceAnywhere), inputs())
    assert str(layers).endswith("are the model's, to the bit")


def fake() -> Tensor:
    with fake_tensors():
        return torch.zeros(2, WIDTH)


def on_meta() -> Tensor:
    return torch.zeros(2, WIDTH, device="meta")


@pytest.mark.parametrize(
    ("make", "where"), [(fake, "under FakeTensorMode"), (on_meta, "on the meta")]
)
def test_inputs_without_values_are_refused(make: Any, where: str) -> None:
    message = rf"inputs hold a tensor of shape \(2, 4\) .*{where}.* Give tensors with values"
    with pytest.raises(BatchError, match=message):
        penstock.capture(Chain(), make())
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    pipe = Pipeline(layers, num_stages=2, threads_per_stage=1)
    with pipe, pytest.raises(BatchError, match=message):
        pipe.eval_step(make())


class ByName(Chain):
    def forward(self, x: Any) -> Tensor:
        return super().forward(x["x"] if isinstance(x, dict) else x)


@pytest.mark.parametrize("is_argument", [True, False])
def test_a_read_only_view_of_a_dict_is_a_mapping_like_any_other(is_argument: bool) -> None:
    view: Any = MappingProxyType({"x": inputs(2)})
    given = (view,) if is_argument else view
    model = ByName()
    with Pipeline(model, num_stages=2, example_inputs=given, threads_per_stage=1) as pipe:
        assert torch.equal(pipe.eval_step(given), model(inputs(2)))


def test_an_embedding_that_changes_its_weight_is_named_where_it_is_computed_again() -> None:
    layers = nn.Sequential(nn.Embedding(5, WIDTH, max_norm=0.5), nn.Linear(WIDTH, WIDTH))
    message = r"nn\.Embedding\(max_norm=\.\.\.\), leave out max_norm"
    options: dict[str, Any] = {"num_stages": 2, "num_microbatches": 2, "threads_per_stage": 1}
    pipe = Pipeline(layers, loss=lambda y, _: y.square().mean(), **options)
    with pipe, pytest.raises(RecomputeError, match=message):
        pipe.train_step(torch.arange(4))
