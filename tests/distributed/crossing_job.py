"""Calls that the processes of a mesh do not make alike, or with what no process can use."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import penstock
from penstock.errors import ConfigError, PenstockError


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


def share_out(pipe: penstock.Pipeline, _: Optimizer) -> None:
    penstock.zero_optimizer(pipe, torch.optim.SGD)


def move(_: penstock.Pipeline, optimizer: Optimizer) -> None:
    optimizer.step()


CALLS: dict[str, Callable[[penstock.Pipeline, Optimizer], None]] = {
    call.__name__: call for call in (step, evaluate, clip, unscale, save, share_out, move)
}


def crossed(first: str, second: str, like: penstock.Mesh) -> tuple[str, bool]:
    """Let rank 0 make the call `first` for pipeline 0, the others `second` for pipeline 1.

    Returns:
        What was raised, and whether pipeline 1 and its gradients are what they were.
    """
    mesh = another(like)
    pipes = [pipeline(mesh), pipeline(mesh)]
    optimizers = [penstock.zero_optimizer(pipe, torch.optim.SGD, lr=0.1) for pipe in pipes]
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
