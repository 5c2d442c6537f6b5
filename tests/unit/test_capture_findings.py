"""What capture leaves as it was, notes and refuses, where that is easy to overlook."""

import copy
import io

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import penstock
from penstock.model.ghost.layers import CapturedLayers
from penstock.model.ghost.record_model import record_model
from tests.any_models.chain import WIDTH, Chain, inputs


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).T


def pipeline(model: nn.Module) -> penstock.Pipeline:
    return penstock.Pipeline(
        CapturedLayers.of(record_model(model, inputs())), num_stages=2, threads_per_stage=1
    )


def test_a_captured_model_is_pickled_as_what_it_was() -> None:
    model = Chain()
    record_model(model, inputs())
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    assert b"penstock" not in file.getvalue()
    assert type(again.blocks[0]) is nn.Linear
    assert torch.equal(again(inputs()), model(inputs()))


@pytest.mark.parametrize("is_pickled", [True, False])
def test_a_copy_of_a_pipeline_runs_as_the_pipeline(is_pickled: bool) -> None:
    with pipeline(Chain()) as pipe:
        expected = pipe.eval_step(inputs())
        if is_pickled:
            file = io.BytesIO()
            torch.save(pipe, file)
            file.seek(0)
            again = torch.load(file, weights_only=False)
        else:
            again = copy.deepcopy(pipe)
        with again:
            assert torch.equal(again.eval_step(inputs()), expected)


def test_a_parametrization_of_a_block_may_be_removed_after_capture() -> None:
    model = Chain()
    parametrize.register_parametrization(model.blocks[1], "weight", Symmetric())
    with pipeline(model) as pipe:
        expected = pipe.eval_step(inputs())
        parametrize.remove_parametrizations(model.blocks[1], "weight")
        assert torch.equal(model(inputs()), expected)
        again = penstock.Pipeline(
            CapturedLayers.of(record_model(model, inputs())), num_stages=2, threads_per_stage=1
        )
        with again:
            assert torch.equal(again.eval_step(inputs()), expected)
    assert type(copy.deepcopy(model).blocks[1]) is nn.Linear
