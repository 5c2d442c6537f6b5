"""What each process of the tests of accumulated steps does."""

from typing import Any

import torch
from torch import Tensor, nn

import penstock

STEPS = 3


def batches(replica: int) -> list[tuple[Tensor, Tensor]]:
    """Give a replica's share of each step's mini-batch: 6 samples, 3 micro-batches."""
    generator = torch.Generator().manual_seed(replica)
    return [
        (torch.randn(6, 4, generator=generator), torch.randn(6, 3, generator=generator))
        for _ in range(STEPS)
    ]


def gradients(
    mesh: penstock.Mesh, way: dict[str, Any], *, parts: int, evaluates: bool = False
) -> dict[str, Tensor | None]:
    """Accumulate the gradients of the same samples in so many steps."""
    torch.manual_seed(0)
    pipe = penstock.Pipeline(
        [nn.Linear(4, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 3)],
        mesh=mesh,
        num_microbatches=3 * STEPS // parts,
        loss=nn.MSELoss(),
        threads_per_stage=1,
        reduction=penstock.Reduction(way["reduction"]),
        schedule=getattr(penstock.schedules, way["schedule"]),
        recompute=penstock.Recompute(way["recompute"]),
    )
    whole = [torch.cat(tensors) for tensors in zip(*batches(mesh.replica), strict=True)]
    steps = batches(mesh.replica) if parts == STEPS else [(whole[0], whole[1])]
    for number, (x, y) in enumerate(steps):
        pipe.train_step(x, y)
        if evaluates:
            pipe.eval_step(x[: 1 + 2 * number])
    return {name: p.grad for name, p in pipe.named_parameters()}


def work(mesh: penstock.Mesh, ways: list[dict[str, Any]]) -> list[list[dict[str, Tensor | None]]]:
    """Accumulate in three steps, with and without evaluating in between, and at once."""
    return [
        [
            gradients(mesh, way, parts=STEPS),
            gradients(mesh, way, parts=STEPS, evaluates=True),
            gradients(mesh, way, parts=1),
        ]
        for way in ways
    ]
