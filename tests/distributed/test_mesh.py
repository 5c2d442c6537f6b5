"""Meshes of processes: axes, stages of unlike meshes, and the collectives along them."""

import socket
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import TCPStore

import penstock
from penstock.errors import ConfigError, PlanError
from penstock.mesh.collectives import Collectives
from penstock.planner.placement import Placement
from tests.distributed.call import call

UNLIKE = Placement((((0,),), ((1, 2),)), ("cpu",) * 2)


def numbers(rank: int, width: int) -> Tensor:
    return torch.arange(width, dtype=torch.float64) + 10 * rank


def collected(group: Collectives) -> dict[str, Any]:
    mine, what = group.rank, "for a test"
    total = numbers(mine, 3)
    group.all_reduce(total, what)
    one = numbers(mine, 2)
    group.broadcast(group.size - 1, one, what)
    shapes = [(n + 1, 2) for n in range(group.size)]
    uneven = numbers(mine, 2 * (mine + 1)).view(mine + 1, 2)
    parts = [numbers(mine, n + 1) for n in range(group.size)]
    exchanged = group.all_to_all(parts, [(mine + 1,)] * group.size, what)
    later = numbers(mine, 3), numbers(mine, 3).float()
    assert group.finish([group.begin_all_reduce(x) for x in later], what) == [*later]
    assert all(torch.equal(x.double(), total) for x in later)
    return {
        "sum": total,
        "last": one,
        "all": group.all_gather(uneven, what, shapes),
        "alike": group.all_gather(numbers(mine, 2), what),
        "part": group.reduce_scatter(parts, what),
        "exchanged": exchanged,
    }


def axes(mesh: penstock.Mesh) -> dict[str, Any]:
    groups = {"stages": mesh.stages, "replicas": mesh.replicas, "shards": mesh.shards}
    return {
        name: (list(group.tensors.ranks), collected(group.tensors))
        for name, group in groups.items()
    }


def in_unlike_meshes(mesh: penstock.Mesh) -> Any:
    with pytest.raises(PlanError, match=r"sharding=None, and a stage has 2 ranks"):
        penstock.Pipeline(
            [torch.nn.Linear(2, 2)] * 2, mesh=mesh, loss=torch.nn.MSELoss(), num_microbatches=1
        )
    return axes(mesh), mesh.world.gather(repr(mesh), "for a test")


def check_collected(found: dict[str, Any], place: int, size: int) -> None:
    everyone = range(size)
    assert torch.equal(found["sum"], torch.stack([numbers(n, 3) for n in everyone]).sum(0))
    assert torch.equal(found["last"], numbers(size - 1, 2))
    for n, (uneven, alike) in enumerate(zip(found["all"], found["alike"], strict=True)):
        assert torch.equal(uneven, numbers(n, 2 * (n + 1)).view(n + 1, 2))
        assert torch.equal(alike, numbers(n, 2))
    part = torch.stack([numbers(n, place + 1) for n in everyone]).sum(0)
    assert torch.equal(found["part"], part)
    for n, part in enumerate(found["exchanged"]):
        assert torch.equal(part, numbers(n, place + 1))


def test_stages_of_unlike_meshes_have_axes_of_their_own(tmp_path: Path) -> None:
    results = call(in_unlike_meshes, UNLIKE, tmp_path)
    expected = {"stages": [[0, 1, 2]] * 3, "replicas": [[0]] * 3, "shards": [[0], [1, 2], [1, 2]]}
    for rank, (found, _) in enumerate(results):
        for axis, (ranks, values) in found.items():
            assert ranks == expected[axis][rank] or len(ranks) == 1
            check_collected(values, ranks.index(rank) if rank in ranks else 0, len(ranks))
    assert results[0][1][2] == "Mesh(2 stages of 1 x 1, 1 x 2, rank 2 of 3: stage 1, shard 1)"


def test_stages_of_a_pipeline_have_as_many_replicas() -> None:
    mesh = penstock.Mesh(Placement((((0,), (1,)), ((2,),)), ("cpu", "cpu")))
    with pytest.raises(ConfigError, match=r"have \[1, 2\] replicas.*give a stage more shards"):
        penstock.Pipeline(
            [torch.nn.Linear(2, 2)] * 2, mesh=mesh, loss=torch.nn.MSELoss(), num_microbatches=1
        )


def test_a_process_alone_collects_what_it_has() -> None:
    check_collected(collected(Collectives()), 0, 1)


def test_a_mesh_of_a_placement_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"placement=.*single process.*nproc-per-node 3"):
        penstock.init_mesh(placement=UNLIKE)
    with pytest.raises(ConfigError, match=r"placement= says who .*num_replicas=2 is given too"):
        penstock.init_mesh(num_replicas=2, placement=UNLIKE)
    with pytest.raises(ConfigError, match=r"num_shards=2, but this is a single process"):
        penstock.init_mesh(num_shards=2)


def test_a_port_that_is_held_is_for_a_store_alone(port: str) -> None:
    """Whatever else is started meanwhile, a job meets where it was told to."""
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", int(port)))
    told: dict[str, Any] = {"wait_for_workers": False, "timeout": timedelta(seconds=10)}
    store = TCPStore("127.0.0.1", int(port), is_master=True, **told)
    store.set("here", "it is")
    assert store.get("here") == b"it is"
