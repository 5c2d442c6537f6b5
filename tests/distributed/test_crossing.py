"""Pipelines that share a mesh are never mixed: a call names the pipeline that it is for."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import penstock
from penstock.errors import ConfigError, PenstockError
from tests.distributed.call import call


def pipeline(mesh: penstock.Mesh) -> penstock.Pipeline:
    """Make a pipeline like every other one here."""
    torch.manual_seed(0)
    layers = [nn.Linear(3, 3) for _ in range(mesh.num_stages)]
    return penstock.Pipeline(layers, mesh=mesh, num_microbatches=2, loss=nn.MSELoss())


def step(pipe: penstock.Pipeline, _: Optimizer) -> None:
    pipe.train_step(torch.ones(4, 3), torch.zeros(4, 3))


def evaluate(pipe: penstock.Pipeline, _: Optimizer) -> None:
    pipe.eval_step(torch.ones(4, 3))


def clip(pipe: penstock.Pipeline, _: Optimizer) -> None:
    penstock.clip_grad_norm_(pipe, 1.0)


def unscale(pipe: penstock.Pipeline, optimizer: Optimizer) -> None:
    penstock.GradScaler(pipe).unscale_(optimizer)


def save(pipe: penstock.Pipeline, _: Optimizer) -> None:
    penstock.save_checkpoint(Path("nowhere"), pipe)


CALLS: dict[str, Callable[[penstock.Pipeline, Optimizer], None]] = {
    call.__name__: call for call in (step, evaluate, clip, unscale, save)
}


def crossed(first: str, second: str, like: penstock.Mesh) -> tuple[str, bool]:
    """Let rank 0 make the call `first` for pipeline 0, the others `second` for pipeline 1.

    Returns:
        What was raised, and whether pipeline 1 and its gradients are what they were.
    """
    mesh = another(like)
    pipes = [pipeline(mesh), pipeline(mesh)]
    optimizers = [torch.optim.SGD([{"params": list(pipe.parameters())}], lr=0.1) for pipe in pipes]
    for pipe, optimizer in zip(pipes, optimizers, strict=True):
        step(pipe, optimizer)
    before = [tensor.clone() for tensor in values(pipes[1])]
    try:
        which = int(mesh.rank > 0)
        CALLS[second if which else first](pipes[which], optimizers[which])
    except PenstockError as error:
        unchanged = all(map(torch.equal, before, values(pipes[1])))
        return f"{type(error).__name__}: {error}", unchanged
    return "nothing was raised", False


def values(pipe: penstock.Pipeline) -> list[Tensor]:
    """Return the parameters here, and their gradients."""
    own = list(pipe.parameters())
    return [p.detach() for p in own] + [p.grad for p in own if p.grad is not None]


def another(like: penstock.Mesh) -> penstock.Mesh:
    """Make a mesh of the same processes, for one that is left after an error."""
    return penstock.init_mesh(like.num_stages, like.num_replicas, timeout_s=60.0)


def all_of_them(mesh: penstock.Mesh, pairs: list[tuple[str, str]]) -> list[tuple[str, bool]]:
    """Try each pair of calls on a mesh of its own."""
    return [crossed(first, second, mesh) for first, second in pairs]


def in_other_order(mesh: penstock.Mesh) -> str:
    """Let rank 0 take one pipeline for made that the others have not."""
    if mesh.rank == 0:
        mesh.world.number_pipeline("of rank 0 only")
    try:
        pipeline(mesh)
    except ConfigError as error:
        return str(error)
    return "nothing was raised"


def without_values(mesh: penstock.Mesh) -> str:
    """Train on inputs on the meta device, where they are read."""
    pipe = pipeline(mesh)
    inputs = torch.ones(4, 3, device="meta") if mesh.stage == 0 else None
    try:
        pipe.train_step(inputs, torch.zeros(4, 3))
    except PenstockError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def refused(mesh: penstock.Mesh) -> tuple[str, str]:
    """Return what pipelines made in another order, and inputs without values, are refused with."""
    return in_other_order(mesh), without_values(another(mesh))


WORDS = {"step": "train_step", "evaluate": "eval_step", "clip": "clip_grad_norm_"}
WORDS |= {"unscale": "GradScaler", "save": "save_checkpoint"}
PAIRS = {
    (2, 1): [("step", "step"), ("clip", "clip"), ("unscale", "evaluate"), ("save", "step")],
    (1, 2): [("step", "step"), ("save", "step")],
}
"""What is done by rank 0 and by rank 1, for each number of stages and replicas."""


@pytest.mark.slow
@pytest.mark.parametrize("layout", [(2, 1), (1, 2)], ids=str)
def test_a_call_for_another_pipeline_is_refused_everywhere_and_names_both(
    layout: tuple[int, int], tmp_path: Path
) -> None:
    pairs = PAIRS[layout]
    by_rank = call(all_of_them, layout, tmp_path, pairs=pairs)
    for pair, *found in zip(pairs, *by_rank, strict=True):
        for error, is_unchanged in found:
            layers = f"({layout[0]} layers, {12 * layout[0]} parameters)"
            for rank, name in enumerate(pair):
                assert f"rank {rank} began {WORDS[name]} of pipeline {rank} {layers}" in error
            assert error.startswith("MeshError")
            assert is_unchanged or "unscale" in pair  # which divides before it asks the others


def test_pipelines_made_in_another_order_and_inputs_without_values_are_refused(tmp_path) -> None:
    (first_order, first), (second_order, second) = call(refused, (2, 1), tmp_path, ends_well=False)
    for error in (first_order, second_order):
        assert "number of pipelines made before: 1 on rank 0; 0 on rank 1" in error
    said = "inputs hold a tensor of shape (4, 3) on the meta device, which has no values"
    assert first.startswith(f"BatchError: {said}")
    assert second.startswith(f"PeerError: rank 0 (stage 0) failed: BatchError: {said}")
