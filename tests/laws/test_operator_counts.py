"""A step calls hardly more of torch's operators than the unsplit model does: the host's work."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import penstock
from penstock_recipes.zoo import transformer_lm

NUM_MICROBATCHES, NUM_BLOCKS, NUM_WORDS = 4, 3, 32


def gpt(dropout: float) -> nn.Sequential:
    torch.manual_seed(0)
    sizes = {"width": 16, "ff_width": 64, "num_heads": 2, "num_words": NUM_WORDS, "max_length": 8}
    return transformer_lm(NUM_BLOCKS, dropout=dropout, **sizes)


def loss(logits: Tensor, words: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), words.flatten())


def num_operators(step: Callable[[], Any]) -> int:
    """Count operators of a step, also those that other operators call; the first steps learn."""
    for _ in range(3):
        step()
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        step()
    return sum(event.name.startswith("aten::") for event in seen.events())


@cache
def num_plain_operators(dropout: float) -> int:
    """Count operators of a step of the unsplit model, micro-batch after micro-batch."""
    words = torch.randint(NUM_WORDS, (NUM_MICROBATCHES, 8))
    model = gpt(dropout)

    def plain() -> None:
        for part in words.chunk(NUM_MICROBATCHES):
            (loss(model(part), part) / NUM_MICROBATCHES).backward()

    return num_operators(plain)


@pytest.mark.parametrize("dropout", (0.0, 0.1))  # also in attention, which is no dropout module
@pytest.mark.parametrize("num_stages", (1, pytest.param(3, marks=pytest.mark.slow)))
def test_a_step_adds_less_than_two_per_cent(num_stages: int, dropout: float) -> None:
    words = torch.randint(NUM_WORDS, (NUM_MICROBATCHES, 8))
    how: dict[str, Any] = {"num_microbatches": NUM_MICROBATCHES, "recompute": "never"}
    how |= {"transport": penstock.Transport.LOOPBACK, "partition": [6 // num_stages] * num_stages}
    with penstock.Pipeline(gpt(dropout), loss=loss, **how) as pipe:
        found = num_operators(lambda: pipe.train_step(words, words))
    assert found <= 1.02 * num_plain_operators(dropout)
