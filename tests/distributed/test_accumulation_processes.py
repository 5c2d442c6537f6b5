"""Gradients of several steps add up in processes as they do in threads."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.schedules import ALL_SCHEDULES
from penstock.types import Recompute, Reduction
from tests.distributed.call import call
from tests.side_by_side import same_bits

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
        schedule=next(family for family in ALL_SCHEDULES if family.name == way["schedule"]),
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


WAYS = [
    {"schedule": schedule.name, "recompute": recompute.value, "reduction": reduction.value}
    for (turn, schedule), reduction in product(enumerate(ALL_SCHEDULES), Reduction)
    for recompute in (list(Recompute)[turn % len(Recompute)],)
]


@pytest.mark.parametrize(
    ("stages", "replicas"), ((1, 2), *(pytest.param(k, 1, marks=pytest.mark.slow) for k in (2, 3)))
)
def test_three_steps_add_up_to_one_of_three_times_the_micro_batches(
    stages: int, replicas: int, tmp_path: Path
) -> None:
    by_rank = call(work, (stages, replicas), tmp_path, ways=WAYS)
    names = {name for found in by_rank for name in found[0][0]}
    assert names == {f"{n}.{kind}" for n in (0, 2, 3) for kind in ("weight", "bias")}
    for found in by_rank:
        for way, (by_parts, evaluated, at_once) in zip(WAYS, found, strict=True):
            for name, gradient in by_parts.items():
                assert same_bits(gradient, evaluated[name]), f"{way}: {name}"
                check_sum(way, gradient, at_once[name], exact=replicas == 1)


def check_sum(way: dict[str, Any], by_parts: Tensor, at_once: Tensor, *, exact: bool) -> None:
    """See that gradients of parts add up; not `exact`: replicas added up each step's by itself."""
    times = 3 if way["reduction"] == "mean" else 1
    if exact and times == 1:
        assert same_bits(by_parts, at_once), way
    torch.testing.assert_close(by_parts / times, at_once, rtol=1e-5, atol=1e-6)
