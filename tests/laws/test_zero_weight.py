"""A micro-batch without a real token: its loss is the mean over nothing, and has no part."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock


class Labelled(nn.Module):  # compute a loss from labels, where -100 stands for no token
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return {"loss": F.cross_entropy(x, labels), "logits": x}


@pytest.mark.parametrize("labels", ([1, 2, -100, -100], [-100, -100, 1, 2]), ids=str)
@pytest.mark.parametrize("recompute", penstock.Recompute)
def test_the_loss_of_a_models_own_is_that_of_the_real_tokens(labels, recompute) -> None:
    torch.manual_seed(0)
    model = Labelled()
    batch = {"x": torch.randn(4, 6), "labels": torch.tensor(labels)}
    real = {name: value[batch["labels"] != -100] for name, value in batch.items()}
    expected = model(**real)["loss"]
    gradients = torch.autograd.grad(expected, list(model.parameters()))
    example = {"x": batch["x"], "labels": torch.zeros(4, dtype=torch.int64)}
    options: dict[str, Any] = {"example_inputs": example, "num_microbatches": 2}
    options |= {"reduction": lambda batch: (batch["labels"] != -100).sum(), "recompute": recompute}
    options |= {"threads_per_stage": 1}
    with penstock.Pipeline(model, 2, **options) as pipe:
        assert torch.equal(pipe.eval_step(batch)["loss"], expected)
        loss = pipe(batch)["loss"]
        assert torch.equal(loss, expected)
        loss.backward()
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert parameter.grad is not None and torch.equal(parameter.grad, gradient)
