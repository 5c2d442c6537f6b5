"""Train a pipeline and the unsplit reference side by side, and say where they differ in a bit."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from pathlib import Path
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
    if (a.dtype, a.layout) != (b.dtype, b.layout):
        return False
    dense = [t if t.layout is torch.strided else t.to_dense() for t in (a, b)]
    return torch.equal(*dense)


def saved_tensors(checkpoint: Path) -> dict[str, Tensor]:
    """Read the tensors of a model and its optimizer."""
    saved = penstock.CheckpointReader(checkpoint)
    of_optimizer = saved.read_optimizer(saved.optimizer_names)
    return {**saved.read_model(saved.model_names), **of_optimizer}


State = list[tuple[str, Tensor | None]]
"""What training changes of a model, each with what it is called."""


def state_of(modules: Sequence[nn.Module]) -> State:
    """List every gradient, parameter and buffer that is not of another process."""
    found: State = []
    for number, module in enumerate(modules):
        for name, parameter in module.named_parameters():
            if not parameter.is_meta:
                found.append((f"gradient of {number}.{name}", parameter.grad))
                found.append((f"parameter {number}.{name}", parameter))
        own = ((name, buffer) for name, buffer in module.named_buffers() if not buffer.is_meta)
        found += [(f"buffer {number}.{name}", buffer) for name, buffer in own]
    return found


def differing(ours: State, unsplit: State, *, is_part: bool = False) -> list[str]:
    """Name what differs between the states of two copies of a model, the first of which may be in
    part in other processes.
    """
    names = [name for name, _ in ours]
    wanted = [(name, b) for name, b in unsplit if not is_part or name in names]
    assert names == [name for name, _ in wanted]
    pairs = zip(ours, wanted, strict=True)
    return [said for (name, a), (_, b) in pairs for said in _differ(name, a, b)]


def differences(
    ours: Sequence[nn.Module], unsplit: Sequence[nn.Module], *, is_part: bool = False
) -> list[str]:
    """Name every gradient, parameter and buffer in which two copies of a model differ."""
    return differing(state_of(ours), state_of(unsplit), is_part=is_part)


def autocast(enabled: bool) -> AbstractContextManager[Any]:
    """Compute in bfloat16 where torch thinks it safe, or as ever."""
    return torch.autocast("cpu", torch.bfloat16) if enabled else nullcontext()


def pipeline(model: Model, built: Built, **options: Any) -> penstock.Pipeline:
    """Make a pipeline of a model, with one intra-op thread per stage."""
    options = {"gradient_dtype": model.gradient_dtype, "threads_per_stage": 1, **options}
    return penstock.Pipeline(built.layers, loss=model.loss, **options)


def assert_trains_like_unsplit(
    model: Model, num_samples: int, *, steps: int = 3, bf16: bool = False, **options: Any
) -> None:
    """Accumulate gradients of several mini-batches in both; all bits must agree at each step."""
    built = model.build()
    expected = unsplit_steps(model, num_samples, options["num_microbatches"], steps, bf16)
    with pipeline(model, built, **options) as pipe:
        for step, batch in enumerate(model.batches(num_samples, steps)):
            with autocast(bf16):
                loss = pipe.train_step(*batch)
            wanted, state = expected[step]
            assert same_bits(loss, wanted), f"step {step}: loss {loss}, unsplit {wanted}"
            found = differing(state_of(built.modules), state)
            assert not found, f"step {step}: " + "; ".join(found)


@lru_cache(maxsize=64)
def unsplit_steps(
    model: Model, num_samples: int, num_microbatches: int, steps: int, bf16: bool
) -> list[tuple[Tensor, State]]:
    """Train the unsplit model; give the loss and a copy of the state after each step.

    It is the same for every way to cut and run the model, so it is kept.
    """
    twin = model.build_unsplit()
    unsplit = Unsplit(twin.modules, twin.forward, num_microbatches)
    done = []
    for batch in model.batches(num_samples, steps):
        with autocast(bf16):
            loss = unsplit.train_step(*batch, model.loss)
        state = state_of(twin.modules)
        copies = [(name, None if t is None else t.detach().clone()) for name, t in state]
        done.append((loss, copies))
    return done


def _differ(what: str, a: Tensor | None, b: Tensor | None) -> list[str]:
    if same_bits(a, b):
        return []
    if a is None or b is None:
        return [f"{what}: {'missing' if a is None else 'there'}, unlike the unsplit one"]
    return [f"{what}: differs by at most {(a - b).abs().max().item():.3g}"]
