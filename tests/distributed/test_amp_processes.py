"""Loss scaling is decided by all processes together."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from tests.distributed.call import call
from tests.distributed.test_crossing import another
from tests.side_by_side import same_bits


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


def overflow(mesh: penstock.Mesh, rank: int, *, clips: bool) -> dict[str, Any]:
    """Train three steps; in the second, one rank alone finds an inf in a gradient."""
    pipe = pipeline(mesh)
    scaler, optimizer = penstock.GradScaler(pipe, init_scale=1024.0), descent(pipe)
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


def work(mesh: penstock.Mesh) -> list[dict[str, Any]]:
    """Let each rank that has a gradient overflow, with and without clipping."""
    ranks = [rank for rank in range(mesh.world_size) if (mesh.num_stages, rank) != (3, 1)]
    return [overflow(mesh, rank, clips=clips) for rank in ranks for clips in (False, True)]


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


def refused(mesh: penstock.Mesh) -> tuple[str, str]:
    """Return what each rank is told of both, each in a mesh of its own."""
    return differing_scales(mesh), half_gradients_on_one_rank(another(mesh))


LAYOUTS = ((3, 1), (1, 2))
"""(Stages, replicas); the second of three stages has no parameters."""


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_an_inf_on_one_rank_skips_the_step_of_all(layout: tuple[int, int], tmp_path: Path) -> None:
    by_rank = call(work, layout, tmp_path)
    for rank, overflows in enumerate(by_rank):
        has_parameters = (len(by_rank), rank) != (3, 1)
        for found, of_first in zip(overflows, by_rank[0], strict=True):
            assert found["scales"] == [1024.0, 512.0, 512.0]
            moved: list[Any] = [{True}, {False}, {True}] if has_parameters else [{False}] * 3
            assert found["moved"] == moved and found["state"] == of_first["state"]


@pytest.mark.slow
def test_scales_that_differ_and_what_torchs_scaler_refuses_on_one_rank_are_errors_on_all(
    tmp_path: Path,
) -> None:
    (differ, first), (twin, second) = call(refused, (2, 1), tmp_path, ends_well=False)
    assert differ == twin and "MeshError: rank 0 scales its loss by 1, rank 1 by 2" in differ
    assert "ValueError: Attempting to unscale FP16 gradients" in first
    assert "PeerError: rank 0 (stage 0) failed: ValueError: Attempting to unscale" in second
    assert "waited for the others to begin the same call" in second


def steps_in_one_autocast(mesh: penstock.Mesh) -> Any:
    """Train three steps, with evaluations between them, inside one autocast."""
    pipe = pipeline(mesh)
    optimizer = torch.optim.SGD([{"params": list(pipe.parameters())}], lr=0.1)
    found = []
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(3):
            found.append(pipe.eval_step(batch(0, mesh.replica)[0]))
            found.append(pipe.train_steps([batch(0, mesh.replica)], optimizer))
    return found


@pytest.mark.slow
def test_one_autocast_around_all_steps_never_trains_on_casts_of_old_weights(tmp_path: Any) -> None:
    apart = call(steps_in_one_autocast, (2, 1), tmp_path)
    together = steps_in_one_autocast(penstock.init_mesh(num_stages=2))
    for found in apart:
        assert all(map(same_bits, found, together))
    assert not torch.equal(together[1], together[3])
