"""What each process of the tests of plans does."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import penstock
from penstock.errors import ConfigError


def pipeline(mesh: penstock.Mesh, **options: Any) -> penstock.Pipeline:
    """Make a pipeline of a small model."""
    torch.manual_seed(0)
    layers = [nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.3), nn.Linear(6, 3)]
    return penstock.Pipeline(layers, mesh=mesh, loss=nn.MSELoss(), **options)


def gradients(pipe: penstock.Pipeline) -> dict[str, Tensor | None]:
    """Train one step."""
    generator = torch.Generator().manual_seed(1)
    pipe.train_step(torch.randn(8, 6, generator=generator), torch.randn(8, 3, generator=generator))
    return {name: p.grad for name, p in pipe.named_parameters()}


def work(mesh: penstock.Mesh) -> dict[str, Any]:
    """Make one pipeline that is measured, one of its plan, and one of a plan that differs."""
    measured = pipeline(
        mesh, num_microbatches=4, threads_per_stage=1 + mesh.rank, example_inputs=torch.zeros(8, 6)
    )
    found = {"plan": measured.plan.to_json(), "gradients": gradients(measured)}
    plan = penstock.Plan.from_json(measured.plan.to_json())
    found["again"] = gradients(pipeline(mesh, plan=plan))
    try:
        pipeline(mesh, plan=replace(plan, seed=mesh.rank))
    except ConfigError as error:
        found["refused"] = str(error)
    return found
