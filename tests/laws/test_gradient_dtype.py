"""Gradients of bfloat16 weights add up in float32, and are then closer to the exact sum."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from penstock import schedules
from penstock.trace import MemoryKind
from tests.every_schedule import IN_TWO_PARTS
from tests.models import LOW_PRECISION
from tests.side_by_side import pipeline

NUM_MICROBATCHES, NUM_WORDS, WIDTH = 32, 11, 6


class Words(nn.Module):
    """Use one bfloat16 matrix in three layers, which may be on three stages."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(NUM_WORDS, WIDTH)
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.first, self.back = (
            nn.Linear(WIDTH, NUM_WORDS, bias=False),
            nn.Linear(NUM_WORDS, WIDTH),
        )
        self.head = nn.Linear(WIDTH, NUM_WORDS, bias=False)
        self.first.weight = self.head.weight = self.embedding.weight
        self.bfloat16()

    def forward(self, words: Tensor) -> Tensor:
        scores: Tensor = self.head(self.back(self.first(self.body(self.embedding(words)))))
        return scores


def loss(scores: Tensor, words: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1).float(), words.flatten())


def words() -> Tensor:
    drawn = torch.Generator().manual_seed(1)
    return torch.randint(0, NUM_WORDS, (NUM_MICROBATCHES, 5), generator=drawn)


@pytest.mark.parametrize(
    ("num_stages", "schedule"),
    ((1, schedules.gpipe), (4, IN_TWO_PARTS)),
)
def test_a_tied_weight_has_the_unsplit_models_bits(num_stages: int, schedule: object) -> None:
    report = penstock.check(
        *(Words(), words(), words()),
        loss=loss,
        num_stages=num_stages,
        num_microbatches=NUM_MICROBATCHES,
        schedule=schedule,
        gradient_dtype=torch.float32,
    )
    assert report.equal, report


def gradients(dtype: torch.dtype | None) -> list[Tensor]:
    model = Words()
    pipe = penstock.Pipeline(
        *(model, 2),
        loss=loss,
        num_microbatches=NUM_MICROBATCHES,
        example_inputs=words()[:1],
        gradient_dtype=dtype,
    )
    pipe.train_step(words(), words())
    return [gradient_of(p) for p in model.parameters()]


def gradient_of(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def test_float32_sums_are_far_closer_to_exact_ones_than_bfloat16_sums() -> None:
    """All three add the same bfloat16 gradients of micro-batches."""
    exact, wide, narrow = (gradients(d) for d in (torch.float64, torch.float32, None))
    for a, b, c in zip(exact, wide, narrow, strict=True):
        assert (a.dtype, b.dtype, c.dtype) == (torch.float64, torch.float32, torch.bfloat16)
        assert 1000 * float((b - a).abs().max()) < float((c - a).abs().max())


def test_gradients_of_earlier_steps_in_the_dtype_of_the_weights_are_added_to() -> None:
    batch, built = LOW_PRECISION.batches(4, 1)[0], LOW_PRECISION.build()
    weights = [p for p in nn.ModuleList(built.modules).parameters() if p.dtype is torch.bfloat16]
    for weight in weights:
        weight.grad = torch.full_like(weight, 2.0**20)  # in bfloat16 the sum would stay so
    with pipeline(LOW_PRECISION, built, num_stages=2, num_microbatches=1) as pipe:
        pipe.train_step(*batch)
    sums = [gradient_of(weight) for weight in weights]
    assert {gradient.dtype for gradient in sums} == {torch.float32}
    assert all(bool(((gradient - 2.0**20).abs() < 2.0**10).all()) for gradient in sums)
    assert any(bool((gradient != 2.0**20).any()) for gradient in sums)


def test_the_bytes_of_wide_gradients_and_main_weights_are_predicted() -> None:
    def main_weights(params: object) -> torch.optim.Optimizer:
        return penstock.MainWeights(torch.optim.AdamW, params)

    model = Words()
    how: dict[str, Any] = {"loss": loss, "targets": words(), "measure": False}
    how |= {"gradient_dtype": torch.float32}
    told = penstock.profile(model, words(), optimizer=main_weights, **how).weights
    optimizer = main_weights(model.parameters())
    with penstock.Pipeline(
        penstock.capture(model, words()[:1]),
        1,
        loss=loss,
        num_microbatches=4,
        trace="memory",
        gradient_dtype=torch.float32,
    ) as pipe:
        pipe.train_step(words(), words())
        optimizer.step()
        assert pipe.last_timeline is not None
        held = pipe.last_timeline.peak_bytes_by_kind()
    state = [t for kept in optimizer.state.values() for t in kept.values()]
    assert held[MemoryKind.WEIGHTS] == (sum(w.parameter_bytes for w in told),)
    assert held[MemoryKind.GRADIENTS] == (sum(w.gradient_bytes for w in told),)
    assert sum(t.nbytes for t in state) == sum(w.optimizer_bytes for w in told)
