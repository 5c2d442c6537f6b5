"""Two pipelines on one mesh, and a call of one process for the wrong one."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import penstock
from penstock.errors import ConfigError, PenstockError


def pipeline(mesh: penstock.Mesh) -> penstock.Pipeline:
    """Make a pipeline like every other one here."""
    torch.manual_seed(0)
    layers = [nn.Linear(3, 3) for _ in range(mesh.num_stages)]
    return penstock.Pipeline(layers, mesh=mesh, num_microbatches=2, loss=nn.MSELoss())


def step(pipe: penstock.Pipeline) -> None:
    pipe.train_step(torch.ones(4, 3), torch.zeros(4, 3))


def evaluate(pipe: penstock.Pipeline) -> None:
    pipe.eval_step(torch.ones(4, 3))


def clip(pipe: penstock.Pipeline) -> None:
    penstock.clip_grad_norm_(pipe, 1.0)


def unscale(pipe: penstock.Pipeline) -> None:
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    penstock.GradScaler(pipe).unscale_(optimizer)


def save(pipe: penstock.Pipeline) -> None:
    penstock.save_checkpoint(Path("nowhere"), pipe)


CALLS: dict[str, Callable[[penstock.Pipeline], None]] = {
    call.__name__: call for call in (step, evaluate, clip, unscale, save)
}


def crossed(first: str, second: str, like: penstock.Mesh) -> tuple[str, bool]:
    """Let rank 0 make the call `first` for pipeline 0, the others `second` for pipeline 1.

    Returns:
        What was raised, and whether the gradients of pipeline 1 are what they were.
    """
    mesh = another(like)
    pipes = [pipeline(mesh), pipeline(mesh)]
    for pipe in pipes:
        step(pipe)
    before = [p.grad.clone() for p in pipes[1].parameters() if p.grad is not None]
    try:
        CALLS[first if mesh.rank == 0 else second](pipes[mesh.rank > 0])
    except PenstockError as error:
        after = [p.grad for p in pipes[1].parameters() if p.grad is not None]
        return f"{type(error).__name__}: {error}", all(map(torch.equal, before, after))
    return "nothing was raised", False


def another(like: penstock.Mesh) -> penstock.Mesh:
    """Make a mesh of the same processes, for one that is left after an error."""
    return penstock.init_mesh(like.num_stages, like.num_replicas, timeout_s=60.0)


def all_of_them(mesh: penstock.Mesh, pairs: list[tuple[str, str]]) -> list[tuple[str, bool]]:
    """Try each pair of calls on a mesh of its own."""
    return [crossed(first, second, mesh) for first, second in pairs]


def in_other_order(mesh: penstock.Mesh) -> str:
    """Let rank 0 take one pipeline for made that the others have not."""
    if mesh.rank == 0:
        mesh.number_pipeline("of rank 0 only")
    try:
        pipeline(mesh)
    except ConfigError as error:
        return str(error)
    return "nothing was raised"
