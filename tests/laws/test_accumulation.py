"""Gradients of several steps add up as those of one step over all their micro-batches."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map

import penstock
from tests.every_schedule import some_schedules
from tests.models import ALL_MODELS, Model
from tests.reference import is_list
from tests.side_by_side import differences, pipeline

OF_A_STEP = ("convolutions", "batch_norms", "frozen_batch_norm", "channels_last", "randomness")
"""Models with BatchNorm, whose statistics move once a step, or that draw by step and number."""
MODELS = [model for model in ALL_MODELS if model.name not in OF_A_STEP]
MOVED_BY_EVALUATION = ("changing_buffers", "changing_attributes")
"""Models whose layers change at every call, also of the unsplit model in evaluation mode."""
EVALUATED = [m for m in ALL_MODELS if m.quiet_in_eval and m.name not in MOVED_BY_EVALUATION]
M, STEPS, SAMPLES = 3, 2, 6


def ways_of(models: list[Model], *stages: int) -> Iterator[Any]:
    """Give each model with a few schedules, each with one number of stages and recompute policy.

    All take turns, so that over the models every two of them meet; one of each model is quick.
    """
    policies = list(penstock.Recompute)
    for turn, model in enumerate(models):
        for s, schedule in enumerate(some_schedules(turn, 3)):
            num_stages = stages[(turn + s) % len(stages)]
            recompute = policies[(turn // len(stages) + s) % len(policies)]
            yield pytest.param(
                model,
                (schedule, recompute),
                num_stages,
                id=f"{model}-{schedule.name}-{recompute.value}-{num_stages}",
                marks=pytest.mark.slow if (turn + s) % 3 else [],
            )


def parts(model: Model, count: int) -> tuple[Any, list[Any]]:
    """Give one batch, and the same samples as `count` smaller ones."""
    ((inputs, targets),) = model.batches(count * SAMPLES, 1)
    rows = [slice(n * SAMPLES, (n + 1) * SAMPLES) for n in range(count)]
    small = [(rows_of(inputs, row), rows_of(targets, row)) for row in rows]
    return (inputs, targets), small


def rows_of(value: Any, rows: slice) -> Any:
    """Pick samples of every tensor, array and list of plain values in a nest."""

    def pick(leaf: Any) -> Any:
        return leaf[rows] if isinstance(leaf, torch.Tensor) or is_list(leaf) else leaf

    return tree_map(pick, value, is_leaf=is_list)


def without_dropout(modules: list[nn.Module]) -> None:
    """Let nothing be dropped: masks belong to steps and micro-batches."""
    for module in nn.ModuleList(modules).modules():
        for name in ("p", "dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


def accumulated(
    model: Model,
    batches: list[Any],
    *,
    drops: bool = False,
    evaluates: bool = False,
    **options: Any,
) -> list[nn.Module]:
    """Train on the batches without zeroing gradients in between; give the modules."""
    built = model.build()
    if not drops:
        without_dropout(built.modules)
    with pipeline(model, built, **options) as pipe:
        for number, batch in enumerate(batches):
            pipe.train_step(*batch)
            if evaluates:
                pipe.eval_step(rows_of(batch[0], slice(0, 1 + 2 * number)))
    return built.modules


@pytest.mark.parametrize("model, way, num_stages", [*ways_of(MODELS, 1, 2, 3, 4)])
def test_two_steps_add_up_to_one_of_twice_the_micro_batches(
    model: Model, way: tuple[Any, penstock.Recompute], num_stages: int
) -> None:
    schedule, recompute = way
    whole, small = parts(model, STEPS)
    options = {
        "num_stages": num_stages,
        "schedule": schedule,
        "recompute": recompute,
        "reduction": penstock.Reduction.SUM,
    }
    by_parts = accumulated(model, small, num_microbatches=M, **options)
    at_once = accumulated(model, [whole], num_microbatches=STEPS * M, **options)
    assert not differences(by_parts, at_once)


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(model, id=repr(model), marks=pytest.mark.slow if turn % 3 else [])
        for turn, model in enumerate(MODELS)
    ],
)
def test_means_add_up_to_twice_the_mean_but_for_rounding(model: Model) -> None:
    whole, small = parts(model, STEPS)
    by_parts = accumulated(model, small, num_stages=2, num_microbatches=M)
    at_once = accumulated(model, [whole], num_stages=2, num_microbatches=STEPS * M)
    compared = 0
    for ours, theirs in zip(by_parts, at_once, strict=True):
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert (a.grad is None) == (b.grad is None)
            if a.grad is not None and b.grad is not None:
                torch.testing.assert_close(a.grad / STEPS, b.grad, rtol=1e-5, atol=1e-6)
                compared += 1
    assert compared or model.name == "without_weights"


@pytest.mark.parametrize("model, way, num_stages", [*ways_of(EVALUATED, 1, 3)])
def test_evaluating_between_the_steps_changes_nothing(model, way, num_stages) -> None:
    schedule, recompute = way
    _, small = parts(model, STEPS)
    options = {
        "num_stages": num_stages,
        "num_microbatches": M,
        "schedule": schedule,
        "recompute": recompute,
        "drops": True,
    }
    without = accumulated(model, small, **options)
    found = differences(accumulated(model, small, evaluates=True, **options), without)
    assert not found
