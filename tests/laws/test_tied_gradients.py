"""A tied weight's gradient is sent once a step if that is asked for; others keep their bits."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from penstock import schedules
from penstock.schedules import Family
from tests.every_schedule import IN_TWO_PARTS
from tests.side_by_side import same_bits

NUM_MICROBATCHES, NUM_WORDS, WIDTH = 4, 11, 6
SUMMED = penstock.TiedGradients.SUMMED
SCHEDULES = (schedules.gpipe, schedules.one_f_one_b, IN_TWO_PARTS)


class Words(nn.Module):
    """Embed words, change them, and score all words with the embedding, or with its own matrix."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(NUM_WORDS, WIDTH)
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.head = nn.Linear(WIDTH, NUM_WORDS, bias=False)
        with torch.no_grad():
            self.head.weight.copy_(self.embedding.weight)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        scores: Tensor = self.head(self.body(self.embedding(words)))
        return scores


def loss(scores: Tensor, words: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), words.flatten())


def batch() -> Tensor:
    return torch.randint(0, NUM_WORDS, (NUM_MICROBATCHES, 5), generator=torch.Generator())


@pytest.mark.parametrize("recompute", penstock.Recompute)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_summed_gradients_of_a_tied_weight_are_the_sum_of_the_stages_sums(
    schedule: Family, recompute: penstock.Recompute
) -> None:
    words, model, untied = batch(), Words(tied=True), Words(tied=False)
    options: dict[str, Any] = {"partition": [2, 1], "num_microbatches": NUM_MICROBATCHES}
    options |= {"loss": loss, "example_inputs": words[:1], "threads_per_stage": 1}
    options |= {"schedule": schedule, "recompute": recompute, "trace": True}
    options |= {"tied_gradients": SUMMED}
    with penstock.Pipeline(model, **options) as pipe:
        pipe.train_step(words, words)
        assert pipe.last_timeline is not None
        moved = pipe.last_timeline.moved_bytes()
    of_embedding, of_head = [], []
    for part in words.split(1):
        (loss(untied(part), part) / NUM_MICROBATCHES).backward()
        of_embedding.append(taken(untied.embedding.weight))
        of_head.append(taken(untied.head.weight))
    of_embedding[-1] = sum_in_order(of_head) + of_embedding[-1]
    assert same_bits(model.embedding.weight.grad, sum_in_order(of_embedding))
    for mine, theirs in zip(model.body.parameters(), untied.body.parameters(), strict=True):
        assert same_bits(mine.grad, theirs.grad)
    activations = words.numel() * WIDTH * 4
    assert moved == dict.fromkeys(((0, 1), (1, 0)), activations + model.head.weight.nbytes)


def taken(parameter: Tensor) -> Tensor:
    gradient, parameter.grad = parameter.grad, None
    assert gradient is not None
    return gradient


def sum_in_order(terms: list[Tensor]) -> Tensor:
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total
