"""A process without a stage takes part in a job as the others do."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, AdamW, Optimizer

import penstock
from penstock import schedules
from penstock.planner.placement import Placement
from penstock.runtime.pipeline_module import parts_of
from tests.distributed.call import call
from tests.distributed.test_checkpoint_processes import MICROBATCHES, batch, layers
from tests.sharding import test_pipeline as gpt
from tests.side_by_side import same_bits

KINDS: dict[str, Callable[..., Optimizer]] = {"AdamW": AdamW, "Adagrad": Adagrad}
"""Adagrad has state of all parameters before the first step."""


def placed(*ranks: int, idle: tuple[int, ...] = (), num_replicas: int = 1) -> Placement:
    """Place a stage on each rank, or its replicas on several in a row."""
    rows = [ranks[n : n + num_replicas] for n in range(0, len(ranks), num_replicas)]
    meshes = tuple(tuple((rank,) for rank in row) for row in rows)
    places = tuple(range(len(rows)))
    return Placement(meshes, ("cpu",) * len(rows), stage_places=places, idle=idle)


def piped(mesh: penstock.Mesh, **options: Any) -> penstock.Pipeline:
    """Make the pipeline, in every process alike."""
    usual: dict[str, Any] = {
        "loss": nn.MSELoss(),
        "threads_per_stage": 1,
        "batch_norm_over_replicas": True,
    }
    options |= {"num_microbatches": MICROBATCHES // mesh.num_replicas, "seed": 4}
    return penstock.Pipeline(layers(), mesh=mesh, **usual, **options)


class Run:  # a pipeline and its optimizer
    def __init__(self, mesh: penstock.Mesh, kind: str) -> None:
        self.pipe = piped(mesh)
        self.optimizer = KINDS[kind](self.pipe.parameters(), lr=0.05)

    def step(self) -> dict[str, Tensor]:
        found, mesh = dict(self._tensors()), self.pipe.mesh
        loss = self.pipe.train_step(*batch(self.pipe.step, mesh.replica, mesh.num_replicas))
        for name, parameter in self.pipe.named_parameters():
            assert parameter.grad is not None
            found[f"gradient {name}"] = parameter.grad.clone()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return found | {"loss": loss}

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in parts_of(self.pipe).held.state().items():
            yield name, tensor.detach().clone()
        for name, parameter in self.pipe.named_parameters():
            for key, value in self.optimizer.state[parameter].items():
                yield f"{key} of {name}", torch.as_tensor(value).clone()


def goes_on(mesh: penstock.Mesh, folders: list[str]) -> dict[str, list[dict[str, Tensor]]]:
    """Load what others have saved, train a step, save, and train another one."""
    found = {}
    for kind in KINDS:
        run = Run(mesh, kind)
        before, after = (Path(folder) / kind for folder in folders)
        penstock.load_checkpoint(before, run.pipe, run.optimizer)
        found[kind] = [run.step()]
        penstock.save_checkpoint(after, run.pipe, run.optimizer)
        found[kind].append(run.step())
    return found


def save_first(folder: Path) -> dict[str, list[dict[str, Tensor]]]:
    """Train and save in this process; return what was found in each step, and in 4 more."""
    found = {}
    for kind in KINDS:
        with (run := Run(penstock.init_mesh(1), kind)).pipe:
            found[kind] = [run.step()]
            penstock.save_checkpoint(folder / "0" / kind, run.pipe, run.optimizer)
            found[kind] += [run.step() for _ in range(4)]
    return found


def check_same(found: list[dict[str, Tensor]], wanted: dict[str, Tensor], where: str) -> None:
    """Compare a step of all processes with that of one, in every bit."""
    assert set().union(*found) == wanted.keys(), where
    for of_rank in found:
        unlike = [name for name, tensor in of_rank.items() if not same_bits(tensor, wanted[name])]
        assert not unlike, f"{where}: {unlike}"


@pytest.mark.slow
def test_jobs_with_and_without_an_idle_rank_go_on_from_each_other_to_the_bit(tmp_path) -> None:
    """One process, 2 of 3, 2, the last two of 4 turned round, and one again."""
    wanted = save_first(tmp_path)
    chain = (placed(1, 2, idle=(0,)), placed(0, 1), placed(3, 2, idle=(0, 1)))
    for number, placement in enumerate(chain):
        folders = [str(tmp_path / str(n)) for n in (number, number + 1)]
        every = call(goes_on, placement, tmp_path, folders=folders)
        for kind in KINDS:
            for step in (0, 1):
                found = [of_rank[kind][step] for of_rank in every]
                check_same(found, wanted[kind][1 + number + step], f"{kind}, {placement}, {step}")
            for rank in placement.idle:
                assert every[rank][kind][0].keys() == {"loss"}
    for kind in KINDS:
        with (run := Run(penstock.init_mesh(1), kind)).pipe:
            penstock.load_checkpoint(tmp_path / "3" / kind, run.pipe, run.optimizer)
            check_same([run.step()], wanted[kind][4], kind)
        unsplit = nn.Sequential(*layers())
        of_unsplit = KINDS[kind](unsplit.parameters())
        penstock.load_checkpoint(tmp_path / "3" / kind, unsplit, of_unsplit)
        assert all(same_bits(t, wanted[kind][4][n]) for n, t in unsplit.state_dict().items())


def asynchronous(mesh: penstock.Mesh) -> tuple[list[float], dict[str, Tensor]]:
    pipe = piped(mesh, partition=[2, 2], schedule=schedules.pipedream_2bw)
    optimizer = SGD(pipe.parameters(), lr=0.05)
    losses = pipe.train_steps([batch(step, 0, 1) for step in range(3)], optimizer)
    return losses.tolist(), {name: p.detach() for name, p in pipe.named_parameters()}


@pytest.mark.slow
def test_an_asynchronous_schedule_trains_with_idle_ranks_as_without(tmp_path: Path) -> None:
    losses, weights = asynchronous(penstock.init_mesh(2))
    found = call(asynchronous, placed(1, 2, idle=(0,)), tmp_path)
    assert all(own == losses for own, _ in found)
    check_same([own for _, own in found], weights, "weights")


@pytest.mark.slow
def test_replicas_beside_an_idle_rank_are_as_without(tmp_path: Path) -> None:
    save_first(tmp_path)
    found = []
    for name, placement in (
        ("without", placed(0, 1, num_replicas=2)),
        ("with", placed(1, 2, idle=(0,), num_replicas=2)),
    ):
        folders = [str(tmp_path / "0"), str(tmp_path / name)]
        found.append(call(goes_on, placement, tmp_path, folders=folders))
    (wanted, _), (idle, *own) = found
    for kind in KINDS:
        for step in (0, 1):
            assert idle[kind][step].keys() == {"loss"}
            check_same([of_rank[kind][step] for of_rank in (idle, *own)], wanted[kind][step], kind)


def in_shards(mesh: penstock.Mesh, folders: list[str]) -> Tensor:
    """Train a step of a GPT from what others have saved, if anything, and save."""
    pipe = gpt.piped(gpt.made(0), mesh=mesh, sharding="megatron" if mesh.world_size > 1 else None)
    optimizer = AdamW(pipe.parameters(), lr=0.01)
    before, after = map(Path, folders)
    if before.exists():
        penstock.load_checkpoint(before, pipe, optimizer)
    loss = pipe.train_step(gpt.WORDS, gpt.WORDS)
    optimizer.step()
    optimizer.zero_grad()
    penstock.save_checkpoint(after, pipe, optimizer)
    return loss


@pytest.mark.slow
def test_shards_beside_an_idle_rank_go_on_from_other_layouts_and_these_from_them(tmp_path) -> None:
    chain = (
        Placement((((1, 2),),), ("cpu",), idle=(0,)),
        Placement((((0,),), ((1, 2),)), ("cpu",) * 2),
        Placement((((2, 3),), ((1,),)), ("cpu",) * 2, stage_places=(0, 1), idle=(0,)),
        Placement((((0,),),), ("cpu",)),
        Placement((((1, 2),),), ("cpu",), idle=(0,)),
    )
    pipe = gpt.as_one()
    optimizer = AdamW(pipe.parameters(), lr=0.01)
    for step, placement in enumerate(chain):
        wanted = pipe.train_step(gpt.WORDS, gpt.WORDS)
        optimizer.step()
        optimizer.zero_grad()
        folders = [str(tmp_path / str(n)) for n in (step, step + 1)]
        for loss in call(in_shards, placement, tmp_path, folders=folders):
            assert torch.allclose(loss, wanted, rtol=0, atol=1e-12), step
