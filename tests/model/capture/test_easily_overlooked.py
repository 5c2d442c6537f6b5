"""What capture leaves as it was, notes and refuses, where that is easy to overlook."""

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import penstock
from penstock import Recompute
from penstock.model.capture.captured import record_model
from penstock.model.capture.source import captured_layers
from tests.model.capture.any_models.chain import WIDTH, Chain, inputs
from tests.model.capture.any_models.lists import REQUIRED
from tests.model.capture.running import assert_trains_as_whole
from tests.model_parts import Does


def pipeline(model: nn.Module) -> penstock.Pipeline:
    return penstock.Pipeline(
        captured_layers(record_model(model, inputs())),
        num_stages=2,
        threads_per_stage=1,
        num_microbatches=1,
    )


def test_a_captured_model_is_pickled_as_what_it_was() -> None:
    model = Chain()
    record_model(model, inputs())
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    assert b"penstock" not in file.getvalue() and type(again.blocks[0]) is nn.Linear
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
    symmetric = Does(lambda weight: weight.triu() + weight.triu(1).T)
    parametrize.register_parametrization(model.blocks[1], "weight", symmetric)
    with pipeline(model) as pipe:
        expected = pipe.eval_step(inputs())
        parametrize.remove_parametrizations(model.blocks[1], "weight")
        assert torch.equal(model(inputs()), expected)
        again = penstock.Pipeline(
            captured_layers(record_model(model, inputs())),
            num_stages=2,
            threads_per_stage=1,
            num_microbatches=1,
        )
        with again:
            assert torch.equal(again.eval_step(inputs()), expected)
    assert type(copy.deepcopy(model).blocks[1]) is nn.Linear


def test_torchs_own_code_may_set_the_random_state() -> None:
    class Dropping(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = checkpoint(self._inner, x, use_reentrant=True)
            return result

        def _inner(self, x: Tensor) -> Tensor:
            with torch.enable_grad():
                y = checkpoint(super().forward, x.requires_grad_(), use_reentrant=False)
                y.sum().backward()
            return nn.functional.dropout(super().forward(x))

    model = Chain()
    model.blocks[1] = Dropping(WIDTH, WIDTH)
    assert len(record_model(model, inputs()).calls) == 3


def test_a_star_in_a_pattern_stands_for_one_part_of_a_name() -> None:
    bert = next(model for model in REQUIRED if model.name == "bert")
    model, batch = bert.make()
    whole = record_model(model, batch(2))
    prefix = next(name for name in whole.blocks if name.endswith("layer.0")).removesuffix(".0")
    layers = tuple((f"{prefix}.{number}", 0) for number in range(5))
    captured = record_model(model, batch(2), blocks=[f"{prefix}.*"], together=[f"{prefix}.[01]"])
    assert (captured.calls, captured.together) == (layers, ((0, 1),))
    finer = [f"{prefix}.0.attention", f"{prefix}.[1-4]"]
    named = record_model(model, batch(2), blocks=finer, together=[f"{prefix}.*"])
    assert named.calls == ((finer[0], 0), *layers[1:]) and named.together == ((0, 4),)


class Gaining(Chain):  # fills all its tensors at once
    def __init__(self) -> None:
        super().__init__()
        self.gain, self.shift = (nn.Parameter(torch.ones(WIDTH)) for _ in range(2))

    def reset_parameters(self) -> None:
        for block in self.blocks:
            block.reset_parameters()  # type: ignore[operator]  # no module, no tensor
        nn.init.ones_(self.gain)
        self.shift = nn.Parameter(torch.zeros(WIDTH))

    def between(self, x: Tensor, _number: int) -> Tensor:
        return x * self.gain + self.shift


def test_what_had_values_keeps_them_where_the_rest_is_made() -> None:
    with torch.device("meta"):
        model = Gaining()
    own = [nn.Parameter(torch.full((WIDTH,), value)) for value in (5.0, 6.0)]
    model.gain, model.shift = own
    with pipeline(model) as pipe:
        pipe.eval_step(inputs())
    assert not any(parameter.is_meta for parameter in model.parameters())
    assert (model.gain is own[0], model.shift is own[1]) == (True, True)
    assert own[0].tolist() == [5.0] * WIDTH and own[1].tolist() == [6.0] * WIDTH


class Fixed(nn.Linear):  # its forward needs nothing of the module
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.tanh()


def test_a_block_may_have_a_static_forward() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Fixed(4, 4), nn.Linear(4, 4))
    captured = record_model(model, torch.ones(2, 4))
    assert len(captured.calls) == 3
    assert torch.equal(model[1](torch.ones(2, 4)), torch.ones(2, 4).tanh()), (
        "outside a pipeline, too"
    )


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
