"""What each process of the tests of mixed precision does."""

from typing import Any

import torch
from torch import Tensor, nn

import penstock


def layers() -> list[nn.Module]:
    """Build the model; the same one in every process.  A stage of its own for each layer leaves
    the second one without parameters.
    """
    torch.manual_seed(0)
    return [nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)]


def batch(step: int, replica: int) -> tuple[Tensor, Tensor]:
    """Give a replica's share of a step's mini-batch."""
    generator = torch.Generator().manual_seed(2 * step + replica)
    return torch.randn(7, 6, generator=generator), torch.randn(7, 3, generator=generator)


def pipeline(mesh: penstock.Mesh) -> penstock.Pipeline:
    return penstock.Pipeline(
        layers(), mesh=mesh, num_microbatches=3, loss=nn.MSELoss(), threads_per_stage=1
    )


def descent(pipe: penstock.Pipeline) -> torch.optim.Optimizer:
    """Make an optimizer; a stage without parameters has one too."""
    return torch.optim.AdamW([{"params": list(pipe.parameters())}], lr=0.1)


def gradients(mesh: penstock.Mesh, scale: float) -> dict[str, Any]:
    """Give the loss and the gradients of two accumulated steps, scaled and unscaled again."""
    pipe = pipeline(mesh)
    scaler = penstock.GradScaler(pipe, init_scale=scale, enabled=scale != 1.0)
    found: dict[str, Any] = {
        f"loss {step}": pipe.train_step(*batch(step, mesh.replica), loss_scale=scaler.get_scale())
        for step in range(2)
    }
    scaler.unscale_(descent(pipe))
    return found | {name: p.grad for name, p in pipe.named_parameters()}


def overflow(mesh: penstock.Mesh, rank: int, *, clips: bool) -> dict[str, Any]:
    """Train three steps; in the second, one rank alone finds an inf in a gradient."""
    pipe = pipeline(mesh)
    scaler = penstock.GradScaler(pipe, init_scale=1024.0)
    optimizer = descent(pipe)
    found: dict[str, Any] = {"scales": [], "moved": []}
    for step in range(3):
        pipe.train_step(*batch(step, mesh.replica), loss_scale=scaler.get_scale())
        if step == 1 and mesh.rank == rank:
            for parameter in pipe.parameters():
                assert parameter.grad is not None
                parameter.grad.view(-1)[-1] = torch.inf
        if clips:
            scaler.unscale_(optimizer)
            penstock.clip_grad_norm_(pipe, 1.0)
        before = [p.detach().clone() for p in pipe.parameters()]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        same = [torch.equal(a, b) for a, b in zip(before, pipe.parameters(), strict=True)]
        found["moved"].append({not each for each in same})
        found["scales"].append(scaler.get_scale())
    return found | {"state": scaler.state_dict()}


def work(mesh: penstock.Mesh) -> dict[str, Any]:
    """Do all that ends well."""
    return {
        "scaled": gradients(mesh, 2.0**16),
        "unscaled": gradients(mesh, 1.0),
        "overflows": [
            overflow(mesh, rank, clips=clips)
            for rank in range(mesh.world_size)
            if rank % 3 != 1 or mesh.num_stages != 3  # it has no gradient
            for clips in (False, True)
        ],
    }


def differing_scales(mesh: penstock.Mesh) -> str:
    """Let each rank scale by another number; give the error."""
    pipe = pipeline(mesh)
    try:
        pipe.train_step(*batch(0, mesh.replica), loss_scale=2.0**mesh.rank)
    except penstock.PenstockError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


def half_gradients_on_one_rank(mesh: penstock.Mesh) -> str:
    """Let torch's scaler refuse what one rank alone gives it; give each rank's error."""
    pipe = pipeline(mesh)
    scaler = penstock.GradScaler(pipe)
    if mesh.rank == 0:
        pipe.half()
        for parameter in pipe.parameters():
            parameter.grad = torch.zeros_like(parameter)
    try:
        scaler.step(descent(pipe))
    except (penstock.PenstockError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"
