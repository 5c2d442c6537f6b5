"""Train a pipeline and the unsplit reference side by side, and say where they differ in a bit."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

import penstock
from tests.models import Built, Model
from tests.reference import Unsplit


def same_bits(a: Tensor | None, b: Tensor | None) -> bool:
    """Tell whether two tensors, or two absences of a tensor, are equal in every bit."""
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and torch.equal(a, b)


def differences(ours: Sequence[nn.Module], unsplit: Sequence[nn.Module]) -> list[str]:
    """Name every gradient, parameter and buffer in which two copies of a model differ."""
    found = []
    for number, (mine, theirs) in enumerate(zip(ours, unsplit, strict=True)):
        for (name, a), (_, b) in zip(
            mine.named_parameters(), theirs.named_parameters(), strict=True
        ):
            found += _differ(f"gradient of {number}.{name}", a.grad, b.grad)
            found += _differ(f"parameter {number}.{name}", a, b)
        for (name, c), (_, d) in zip(mine.named_buffers(), theirs.named_buffers(), strict=True):
            found += _differ(f"buffer {number}.{name}", c, d)
    return found


def autocast(enabled: bool) -> AbstractContextManager[Any]:
    """Compute in bfloat16 where torch thinks it safe, or as ever."""
    return torch.autocast("cpu", torch.bfloat16) if enabled else nullcontext()


def pipeline(model: Model, built: Built, **options: Any) -> penstock.Pipeline:
    """Make a pipeline of a model, with one intra-op thread per stage."""
    return penstock.Pipeline(built.layers, loss=model.loss, threads_per_stage=1, **options)


def assert_trains_like_unsplit(
    model: Model, num_samples: int, *, steps: int = 3, bf16: bool = False, **options: Any
) -> None:
    """Accumulate gradients of several mini-batches in both; all bits must agree at each step."""
    built, twin = model.build(), model.build()
    unsplit = Unsplit(twin.modules, twin.forward, options["num_microbatches"])
    ours, theirs = model.batches(num_samples, steps), model.batches(num_samples, steps)
    with pipeline(model, built, **options) as pipe:
        for step, (batch, same_batch) in enumerate(zip(ours, theirs, strict=True)):
            with autocast(bf16):
                expected = unsplit.train_step(*same_batch, model.loss)
                loss = pipe.train_step(*batch)
            assert same_bits(loss, expected), f"step {step}: loss {loss}, unsplit {expected}"
            found = differences(built.modules, twin.modules)
            assert not found, f"step {step}: " + "; ".join(found)


def _differ(what: str, a: Tensor | None, b: Tensor | None) -> list[str]:
    if same_bits(a, b):
        return []
    if a is None or b is None:
        return [f"{what}: {'missing' if a is None else 'there'}, unlike the unsplit one"]
    return [f"{what}: differs by at most {(a - b).abs().max().item():.3g}"]
