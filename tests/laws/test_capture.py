"""Any module, cut at random places, computes what it computes whole, to the bit."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock import Pipeline, Recompute, schedules
from penstock.model.ghost.inputs import as_call
from tests.any_models import REQUIRED, AnyModel
from tests.capturing import (
    BATCH,
    MICROBATCHES,
    assert_equal,
    buffers,
    gradients,
    loss,
    random_cut,
)

FEW = ("gpt2", "llama", "t5", "whisper, layers dropped", "resnet", "unet", "branching")
"""What differs most, for every run; all others are among the slow ones."""
EVERY = [
    pytest.param(m, id=m.name, marks=[] if m.name in FEW else pytest.mark.slow) for m in REQUIRED
]
WAYS = [
    (1, schedules.gpipe, Recompute.NEVER),
    (2, schedules.one_f_one_b, Recompute.NEVER),
    (3, schedules.gpipe, Recompute.STAGE),
    (4, schedules.eager_1f1b, Recompute.STAGE),
]


def parts_of(inputs: Any, sizes: list[int]) -> list[Any]:
    starts = [sum(sizes[:n]) for n in range(len(sizes))]

    def part(value: Any, start: int, size: int) -> Any:
        return value[start : start + size] if isinstance(value, Tensor) else value

    if isinstance(inputs, dict):
        return [
            {name: part(value, start, size) for name, value in inputs.items()}
            for start, size in zip(starts, sizes, strict=True)
        ]
    return [part(inputs, start, size) for start, size in zip(starts, sizes, strict=True)]


@pytest.mark.parametrize("model", EVERY)
def test_without_dropout_gradients_are_the_models(model: AnyModel) -> None:
    whole, inputs_of = model.make()
    whole.eval()
    inputs, target = inputs_of(BATCH), torch.zeros(BATCH)
    cut = copy.deepcopy(whole)
    sizes = [2, 1, 1]
    for part, size in zip(parts_of(inputs, sizes), sizes, strict=True):
        args, kwargs = as_call(part)
        (loss(whole(*args, **kwargs), target) * (size / BATCH)).backward()
    layers = penstock.capture(cut, inputs, check=False)
    pipe = make_pipeline(layers, 3, schedules.one_f_one_b, Recompute.NEVER)
    with pipe:
        pipe.train_step(inputs, target)
    assert_equal(gradients(cut), gradients(whole))


@pytest.mark.parametrize("model", EVERY)
def test_in_training_nothing_depends_on_the_cuts(model: AnyModel) -> None:
    expected: tuple[Any, ...] | None = None
    for num_stages, schedule, recompute in WAYS:
        found = train(model, num_stages, schedule, recompute)
        expected = expected or found
        assert found[0] == expected[0]
        assert_equal(found[1], expected[1])
        assert_equal(found[2], expected[2])


def train(
    model: AnyModel, num_stages: int, schedule: Callable[..., Any], recompute: Recompute
) -> tuple[list[float], dict[str, Tensor | None], dict[str, Tensor]]:
    """Train for three steps, of two sizes; give losses, gradients and buffers."""
    made, inputs_of = model.make()
    made.train()
    layers = penstock.capture(made, inputs_of(BATCH), check=False)
    losses = []
    with make_pipeline(layers, num_stages, schedule, recompute) as pipe:
        for batch in (BATCH, BATCH, 2):
            losses.append(float(pipe.train_step(inputs_of(batch), torch.zeros(batch))))
    return losses, gradients(made), buffers(made)


def make_pipeline(
    layers: penstock.Layers, num_stages: int, schedule: Callable[..., Any], recompute: Recompute
) -> Pipeline:
    return Pipeline(
        layers,
        partition=random_cut(len(layers), num_stages),
        num_microbatches=MICROBATCHES,
        loss=loss,
        schedule=schedule,
        recompute=recompute,
        threads_per_stage=1,
    )


def test_all_gradients_are_clipped_also_of_parameters_between_blocks() -> None:
    model = next(m for m in REQUIRED if m.name == "branching")
    whole, inputs_of = model.make()
    cut = copy.deepcopy(whole)
    inputs = inputs_of(BATCH)
    loss(whole(inputs), inputs).backward()
    layers = penstock.capture(cut, inputs, check=False)
    pipe = Pipeline(layers, num_stages=3, loss=loss, threads_per_stage=1)
    with pipe:
        pipe.train_step(inputs, inputs)
        found = penstock.clip_grad_norm_(pipe, 1e-3)
    expected = nn.utils.clip_grad_norm_(whole.parameters(), 1e-3)
    torch.testing.assert_close(found, expected)
    assert cut.scale.grad is not None
    for mine, theirs in zip(cut.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
