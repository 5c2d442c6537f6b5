"""A loss that a model computes and divides by a given number is that of the batch."""

import copy
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.errors import BatchError, OutputWarning, UncountedError

IGNORED = -100
Batch = dict[str, Any]


def made(kind: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    ends = {"use_cache": False, "bos_token_id": 0, "eos_token_id": 1}
    if kind == "gpt2":
        sizes = {"vocab_size": 30, "n_positions": 8, "n_embd": 8, "n_layer": 2, "n_head": 2}
        off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        gpt2 = transformers.GPT2Config(**sizes, **off, **ends)
        return transformers.GPT2LMHeadModel(gpt2).double()
    sizes = {"vocab_size": 30, "hidden_size": 8, "intermediate_size": 16}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **ends)).double()


def batch(given: str = "a number") -> Batch:
    """Return four rows of which some have fewer labels than others, and how many all have."""
    torch.manual_seed(1)
    ids = torch.randint(2, 30, (4, 8))
    labels = ids.clone()
    labels[0, 3:] = labels[2, 6:] = IGNORED
    counted = int((labels[:, 1:] != IGNORED).sum())
    count = {"a number": counted, "a tensor": torch.tensor(counted)}.get(given)
    return {"input_ids": ids, "labels": labels, "num_items_in_batch": count}


QUICK = (("gpt2", "a number", 2, 2), ("llama", "a tensor", 4, 1))


def counted() -> Iterator[object]:
    for case in product(("gpt2", "llama"), ("a number", "a tensor"), (1, 2, 4), (1, 2)):
        yield pytest.param(*case, marks=[] if case in QUICK else [pytest.mark.slow])


@pytest.mark.parametrize(("kind", "given", "num_microbatches", "num_stages"), list(counted()))
def test_a_count_of_items_gives_the_whole_batchs_gradients(
    kind: str, given: str, num_microbatches: int, num_stages: int
) -> None:
    whole, cut, inputs = made(kind), made(kind), batch(given)
    expected = whole(**inputs).loss
    expected.backward()
    with penstock.Pipeline(
        cut,
        num_stages,
        num_microbatches=num_microbatches,
        example_inputs=inputs,
        threads_per_stage=1,
    ) as pipe:
        loss = pipe.train_step(inputs)
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-6, atol=0)
        torch.testing.assert_close(pipe.eval_step(**inputs).loss, loss, rtol=1e-6, atol=0)
    for mine, theirs in zip(cut.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=0, atol=1e-12)


class Divided(nn.Module):
    """Returns its loss: a sum over all values, the mean, or that sum over a given number."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        self.how = how

    def forward(
        self, x: Tensor, num_items_in_batch: float | Tensor | None = None
    ) -> dict[str, Tensor]:
        for block in self.blocks:
            x = block(x).tanh()
        if num_items_in_batch is not None:
            return {"loss": x.square().sum() / num_items_in_batch}
        return {"loss": x.square().sum() if self.how == "sum" else x.square().mean()}


X = torch.linspace(-1, 1, 12).reshape(4, 3)


def pipeline(model: nn.Module, **options: Any) -> penstock.Pipeline:
    usual: dict[str, Any] = {"num_microbatches": 2, "example_inputs": {"x": X}}
    return penstock.Pipeline(model, 2, **usual | options, threads_per_stage=1)


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_a_sum_that_would_be_averaged_is_warned_of_with_the_factor(num_microbatches: int) -> None:
    if num_microbatches == 1:
        pipeline(Divided("sum"), num_microbatches=1).close()
        return
    with pytest.warns(OutputWarning, match=r"together is 2 times.*reduction=.*SUM"):
        pipeline(Divided("sum")).close()


@pytest.mark.parametrize("how", ["sum", "mean"])
def test_a_loss_that_adds_up_is_not_warned_of(how: str) -> None:
    reduction = penstock.Reduction.SUM if how == "sum" else penstock.Reduction.MEAN
    pipeline(Divided(how), reduction=reduction).close()


def test_a_loss_is_compared_without_a_trace() -> None:
    model = Divided("mean")
    before = copy.deepcopy(vars(model)), torch.get_rng_state()
    pipeline(model).close()
    assert str(vars(model)) == str(before[0])
    assert torch.equal(torch.get_rng_state(), before[1])


def by_tokens(inputs: Batch) -> Tensor:
    return (inputs["x"] != 0).sum()


@pytest.mark.parametrize(
    ("reduction", "inputs"),
    [
        (penstock.Reduction.MEAN, {"x": X, "num_items_in_batch": 0}),
        (penstock.Reduction.SUM, {"x": X, "num_items_in_batch": torch.tensor(0)}),
        (by_tokens, {"x": torch.zeros(4, 3)}),
    ],
)
def test_a_batch_of_which_nothing_counts_is_refused_and_the_next_one_runs(
    reduction: Any, inputs: Batch
) -> None:
    example = {"x": X} if reduction is by_tokens else {"x": X, "num_items_in_batch": 12}
    with pipeline(Divided("mean"), reduction=reduction, example_inputs=example) as pipe:
        with pytest.raises(UncountedError, match="is there a real token"):
            pipe.train_step(inputs)
        assert all(parameter.grad is None for parameter in pipe.parameters())
        assert pipe.train_step(example).isfinite()


def test_a_loss_is_not_weighed_twice() -> None:
    twice = pytest.raises(BatchError, match=r"num_items_in_batch.*\(12\).*once more")
    with pipeline(Divided("mean"), reduction=by_tokens) as pipe, twice:
        pipe.train_step({"x": X, "num_items_in_batch": 12})


def test_a_loss_of_the_users_own_is_a_mean_whatever_the_model_is_told() -> None:
    def own(output: dict[str, Tensor], _: None) -> Tensor:
        return output["loss"] * 12

    inputs = {"x": X, "num_items_in_batch": 12}
    with pipeline(Divided("mean"), loss=own) as pipe:
        found = pipe.train_step(inputs)
        whole = own(pipe.eval_step(x=X, num_items_in_batch=12), None)
    torch.testing.assert_close(found, whole / 2)
