"""Any module goes into a pipeline as it is: with labels, keywords, and inputs on every stage."""

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock import Pipeline
from penstock.errors import ConfigError, CutError, PartitionError
from tests.model.capture.any_models.lists import REQUIRED
from tests.model.capture.any_models.made import AnyModel
from tests.model.capture.running import assert_equal, assert_trains_as_whole, gradients

BY_NAME = {model.name: model for model in REQUIRED}
WITH_LABELS = ("gpt2", "llama, tied", "bert", "t5")


def labelled(model: AnyModel, batch: int) -> tuple[Any, dict[str, Any]]:
    made, inputs_of = model.make()
    inputs = inputs_of(batch)
    labels = inputs.get("decoder_input_ids", inputs["input_ids"]).clone()
    labels[:, :2] = -100
    labels[0, :4] = -100
    return made.eval(), {**inputs, "labels": labels}


def real_tokens(batch: dict[str, Tensor]) -> Tensor:
    return (batch["labels"][:, 1:] != -100).sum()


def weighed_losses(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    """Run the model on halves of a batch; add up their losses by the tokens that count."""
    halves = [
        {name: v[start : start + 2] if isinstance(v, Tensor) else v for name, v in batch.items()}
        for start in (0, 2)
    ]
    counts = [float(real_tokens(half)) for half in halves]
    total = torch.zeros(())
    for half, count in zip(halves, counts, strict=True):
        loss, share = model(**half).loss, count / sum(counts)
        if loss.requires_grad:
            torch.autograd.backward(loss, torch.full_like(loss, share))
        total = total + loss.detach() * share
    return total


@pytest.mark.parametrize("name", WITH_LABELS)
def test_a_model_that_computes_its_own_loss_is_trained_from_labels(name: str) -> None:
    model, batch = labelled(BY_NAME[name], 4)
    whole = copy.deepcopy(model)
    trained = weighed_losses(whole, batch)
    with torch.no_grad():
        evaluated = weighed_losses(whole, batch)
    options: dict[str, Any] = {"reduction": real_tokens, "threads_per_stage": 1}
    with Pipeline(
        model, num_stages=3, example_inputs=batch, num_microbatches=2, **options
    ) as pipe:
        assert torch.equal(pipe.train_step(batch), trained)
        assert_equal(gradients(model), gradients(whole))
        assert torch.equal(pipe.eval_step(batch).loss, evaluated)
        model.zero_grad()
        outputs = pipe(batch)
        assert torch.equal(outputs.loss, trained)
        outputs.loss.backward()
        assert_equal(gradients(model), gradients(whole))


def test_a_pipeline_of_a_captured_model_is_checked_against_the_whole_one() -> None:
    model, batch = labelled(BY_NAME["gpt2"], 4)
    before = copy.deepcopy(model.state_dict())
    report = penstock.check(model.train(), batch, num_stages=3, num_microbatches=2)
    assert report.equal, str(report)
    assert {"loss", "gradient", "output"} <= {row.kind for row in report.rows}
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class Noisy(nn.Linear):  # adds to what it computes a number that is another one each time
    numbers = itertools.count()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + next(self.numbers)


def stack(*layers: nn.Module) -> nn.Module:
    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(layers)

        def forward(self, x: Tensor) -> Tensor:
            for part in self.parts:
                x = x + part(x)
            return x

    return Stack()


def test_a_model_that_gives_other_bits_each_time_is_not_called_checked() -> None:
    with pytest.warns(UserWarning, match="gives other bits each time, in evaluation mode too"):
        layers = penstock.capture(stack(nn.Linear(4, 4), Noisy(4, 4)), torch.randn(2, 4))
    assert "not checked: the model gives other bits each time" in str(layers)


def test_a_model_is_not_compared_if_nobody_asks() -> None:
    model = stack(nn.Linear(4, 4), nn.Linear(4, 4))
    assert "checked: outputs" in str(penstock.capture(model, torch.randn(2, 4)))
    assert "not checked" in str(penstock.capture(model, torch.randn(2, 4), check=False))


def test_blocks_that_belong_together_stay_on_one_stage() -> None:
    model = stack(*(nn.Linear(4, 4) for _ in range(5)))
    layers = penstock.capture(model, torch.randn(2, 4), together=["parts.1", "parts.3"])
    for num_stages, expected in ((2, None), (3, (1, 3, 1))):
        with Pipeline(
            layers, num_stages=num_stages, threads_per_stage=1, num_microbatches=1
        ) as pipe:
            assert expected in (None, pipe.partition) and sum(pipe.partition[:1]) not in (2, 3)
    with pytest.raises(CutError, match="4 stages asked, 5 block calls found, cut into 3"):
        Pipeline(layers, num_stages=4, num_microbatches=1)
    with pytest.raises(PartitionError, match="which together= keeps on one"):
        Pipeline(layers, partition=[2, 3], num_microbatches=1)
    with pytest.raises(CutError, match="names 'heads', which fits no block"):
        penstock.capture(model, torch.randn(2, 4), together=["heads"])


def test_inputs_that_every_stage_is_given_do_not_travel() -> None:
    model, batch = labelled(BY_NAME["gpt2"], 4)
    whole = copy.deepcopy(model)
    loss = whole(**batch).loss
    loss.backward()
    layers = penstock.capture(model, batch, inputs="everywhere")
    with Pipeline(layers, num_stages=4, threads_per_stage=1, num_microbatches=1) as pipe:
        assert torch.equal(pipe.train_step(batch), loss.detach())
        assert_equal(gradients(model), gradients(whole))
    chain = stack(nn.Linear(4, 4), nn.Linear(4, 4))
    layers = penstock.capture(chain, torch.randn(2, 4), inputs="everywhere")
    pipe = Pipeline(
        layers, num_stages=2, loss=lambda y, _: y.sum(), threads_per_stage=1, num_microbatches=1
    )
    with pipe, pytest.raises(CutError, match="requires grad, and is given to every stage"):
        pipe.train_step(torch.randn(2, 4, requires_grad=True))


def test_what_does_not_fit_is_said_before_anything_runs() -> None:
    model, batch = labelled(BY_NAME["bert"], 2)
    with pytest.raises(ConfigError, match=r"is no plain nn.Sequential: give example_inputs"):
        Pipeline(model, num_stages=2, num_microbatches=1)
    with pytest.raises(CutError, match="missing a required argument: 'x'"):
        penstock.capture(stack(nn.Linear(4, 4)), {})
    with pytest.raises(CutError, match="and was given a list"):
        penstock.capture([nn.Linear(4, 4)], torch.randn(2, 4))  # type: ignore[arg-type]
    with pytest.raises(CutError, match=r"inputs='all'; choose 'first' or 'everywhere'"):
        penstock.capture(model, batch, inputs="all")
    batch.pop("labels")
    pipe = Pipeline(
        model, num_stages=2, example_inputs=batch, threads_per_stage=1, num_microbatches=1
    )
    with pipe, pytest.raises(ConfigError, match=r"MaskedLMOutput of logits, has no loss\. Give"):
        pipe.train_step(batch)


def test_a_captured_model_prints_as_a_table() -> None:
    model, batch = labelled(BY_NAME["llama, tied"], 2)
    lines = str(penstock.capture(model, batch)).splitlines()
    assert lines[0].startswith("LlamaForCausalLM: 8 layers, ")
    assert lines[1].split("  ")[0] == "layer"
    assert "tied: model.embed_tokens.weight = lm_head.weight" in lines
    assert lines[-1].startswith("checked: outputs and gradients over 8 stages are the model's")


class OwnForward(nn.Sequential):  # a Sequential by kind, which does something else
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


def test_a_sequential_with_a_forward_of_its_own_is_run_by_it() -> None:
    model = OwnForward(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    hooked = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    hooked.register_forward_hook(lambda module, args, output: output * 2)
    x = torch.randn(3, 4)
    for chain in (model, hooked):
        with pytest.raises(ConfigError, match=r"is no plain nn\.Sequential: give example_inputs"):
            Pipeline(chain, num_stages=2, num_microbatches=1)
        with Pipeline(
            chain, num_stages=2, example_inputs=x, threads_per_stage=1, num_microbatches=1
        ) as pipe:
            assert torch.equal(pipe.eval_step(x), chain.eval()(x))


class GradientsOff(nn.Module):  # switches gradients off around its second block, and on again
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for number, part in enumerate(self.parts):
            before = torch.is_grad_enabled()
            torch.set_grad_enabled(before and number != 1)
            y = part(x)
            torch.set_grad_enabled(before)
            x = x + y
        return x


def test_what_a_stage_leaves_off_is_on_again_for_its_next_micro_batch() -> None:
    x = torch.randn(4, 4)
    assert_trains_as_whole(GradientsOff(), x, num_microbatches=4, partition=[1, 1, 1, 1])


def test_weights_that_were_untied_or_replaced_since_are_refused() -> None:
    model, batch = labelled(BY_NAME["gpt2"], 4)
    layers = penstock.capture(model, batch)
    with Pipeline(layers, num_stages=2, threads_per_stage=1, num_microbatches=1) as pipe:
        pipe.train_step(batch)
        bias = model.transformer.h[0].ln_1.bias
        model.transformer.h[0].ln_1.bias = nn.Parameter(bias.detach().clone())
        with pytest.raises(CutError, match="the parameter 'bias' is another one than when"):
            pipe.train_step(batch)
        model.transformer.h[0].ln_1.bias = bias
        pipe.train_step(batch)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    with pytest.raises(CutError, match=r"'lm_head\.weight' and '.*' were one parameter"):
        Pipeline(layers, num_stages=2, num_microbatches=1)
