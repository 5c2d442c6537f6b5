"""Processes agree on a plan before anything is cut."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock import Plan
from penstock.errors import ConfigError, PenstockError
from penstock.schedules import zb_h1
from tests.distributed.call import call
from tests.side_by_side import same_bits


class Powers(nn.Module):  # has a weight whose gradient cannot wait
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x.mm(self.weight.exp())


def pipeline(mesh: penstock.Mesh, **options: Any) -> penstock.Pipeline:
    torch.manual_seed(0)
    layers = [nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.3), nn.Linear(6, 3)]
    return penstock.Pipeline(layers, mesh=mesh, loss=nn.MSELoss(), **options)


def gradients(pipe: penstock.Pipeline) -> dict[str, Tensor | None]:
    generator = torch.Generator().manual_seed(1)
    pipe.train_step(torch.randn(8, 6, generator=generator), torch.randn(8, 3, generator=generator))
    return {name: p.grad for name, p in pipe.named_parameters()}


def work(mesh: penstock.Mesh) -> dict[str, Any]:
    """Make one pipeline that is measured, one of its plan, and one of a plan that differs."""
    measured = pipeline(
        mesh, num_microbatches=4, threads_per_stage=1 + mesh.rank, example_inputs=torch.zeros(8, 6)
    )
    found = {"plan": measured.plan.to_json(), "gradients": gradients(measured)}
    found["divided"] = in_two_parts(mesh)
    plan = penstock.Plan.from_json(measured.plan.to_json())
    found["again"] = gradients(pipeline(mesh, plan=plan))
    found["refused"] = refusal(mesh, replace(plan, seed=mesh.rank))
    return found


def in_two_parts(mesh: penstock.Mesh) -> str:
    """Return the plan after a step in which rank 1 has seen that a layer is not split."""
    layers = [nn.Linear(6, 6), Powers()]
    options: dict[str, Any] = {"num_microbatches": 4, "partition": [1, 1]}
    pipe = penstock.Pipeline(layers, mesh=mesh, loss=nn.MSELoss(), schedule=zb_h1(), **options)
    gradients(pipe)
    return str(pipe.plan)


def refusal(mesh: penstock.Mesh, plan: Plan) -> str:
    try:
        pipeline(mesh, plan=plan)
    except ConfigError as error:
        return str(error)
    return "nothing was raised"


def test_processes_run_the_plan_of_rank_0(tmp_path: Path) -> None:
    first, second = call(work, (2, 1), tmp_path)
    assert first["plan"] == second["plan"]
    plan = Plan.from_json(first["plan"])
    assert (plan.placement.num_ranks, plan.threads_per_stage) == (2, 1)
    assert plan.predicted_s is not None and first["divided"] == second["divided"]
    assert "layer '1' (Powers), 100% of its weights: Exp cannot be cut" in first["divided"]
    for found in (first, second):
        assert found["gradients"]
        for name, gradient in found["gradients"].items():
            assert same_bits(gradient, found["again"][name]), name
        assert "do not agree on seed: 0 on rank 0; 1 on rank 1" in found["refused"]


def limited(mesh: penstock.Mesh | None) -> tuple[str, dict[str, Tensor | None], str]:
    """Train with a limit for each rank; say what was chosen, and refused."""
    torch.manual_seed(0)
    wide = nn.Sequential(nn.Linear(6, 48), nn.Tanh(), nn.Dropout(0.3), nn.Linear(48, 6))
    options: dict[str, Any] = {"num_microbatches": 4, "partition": [2, 2], "mesh": mesh}
    options["schedule"] = "gpipe"
    layers = [copy.deepcopy(wide) for _ in range(4)]
    x = torch.zeros(8, 6)
    pipe = penstock.Pipeline(
        layers,
        loss=nn.MSELoss(),
        example_inputs=x,
        memory_limit_bytes=[6_500, 2_600],  # one choice fits each, whatever layers take
        threads_per_stage=1,
        **options,
    )
    pipe.train_step(torch.linspace(0, 1, 48).view(8, 6), x)
    layers = [copy.deepcopy(wide) for _ in range(4)]
    with pytest.raises(PenstockError) as caught:
        penstock.Pipeline(layers, example_inputs=x, memory_limit_bytes=[10**9, 1], **options)
    found = {name: p.grad for name, p in pipe.named_parameters()}
    plan = pipe.plan
    return str((plan.recompute, plan.offload, plan.predicted_peak_bytes)), found, str(caught.value)


@pytest.mark.slow
def test_a_limit_of_memory_is_met_by_the_same_choice_in_processes_as_in_one(tmp_path: Any) -> None:
    chosen, gradients, refused = limited(None)
    assert "(RecomputeLayers(layers=(1,)), <Recompute.STAGE" in chosen
    by_rank = call(limited, (2, 1), tmp_path, ends_well=False)  # the last is refused
    together: dict[str, Tensor | None] = {}
    for found in by_rank:
        assert found[0] == chosen and refused in found[2]
        together |= found[1]
    assert together.keys() == gradients.keys()
    assert all(same_bits(together[name], gradients[name]) for name in gradients)
