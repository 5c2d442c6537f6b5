"""What each process of the tests of traced steps does."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import penstock
from penstock.trace.timeline import Timeline


def timelines(mesh: penstock.Mesh, choices: list[list[str]]) -> list[str | None]:
    """Train one step for each row of choices, one for each rank; give the timelines as JSON."""
    torch.manual_seed(0)
    pipe = penstock.Pipeline(
        [nn.Linear(4, 4) for _ in range(mesh.num_stages)],
        mesh=mesh,
        num_microbatches=3,
        loss=nn.MSELoss(),
        threads_per_stage=1,
    )
    found: list[Timeline | None] = []
    for row in choices:
        pipe.trace = penstock.Trace(row[mesh.rank])
        pipe.train_step(torch.randn(6, 4), torch.randn(6, 4))
        pipe.eval_step(torch.randn(5, 4))
        found.append(pipe.last_timeline)
        assert pipe.trace is penstock.Trace(row[mesh.rank])
    return [None if timeline is None else timeline.to_json() for timeline in found]


def work(mesh: penstock.Mesh) -> dict[str, Any]:
    """Trace alike, and each rank in another way; count what passes hooks of the caller's."""
    size = mesh.world_size
    strongest_last = ["off"] * (size - 1) + ["memory"]
    rows = [["time"] * size, ["off"] * size, ["memory"] * size, strongest_last, ["off"] * size]
    packed: list[None] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(None)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        found = timelines(mesh, rows)
    return {"timelines": found, "replica": mesh.replica, "under_callers_hooks": bool(packed)}
