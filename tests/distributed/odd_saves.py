"""Saves that processes do not make alike, or of odd values; called in two processes."""

import threading
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

import penstock
from tests.equality import same_bits
from tests.model_parts import Masters


class Normed(nn.Module):
    """A model that is captured, with buffers on each of two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.second = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.first(x))
        return y


def work(mesh: penstock.Mesh, folder_for_saves: str) -> list[str]:
    """Give what came of each."""
    folder = Path(folder_for_saves)
    torch.manual_seed(0)
    layers = [nn.Linear(2, 2), nn.Linear(2, 2)]
    pipe = penstock.Pipeline(layers, mesh=mesh, loss=nn.MSELoss())
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    found = []
    try:
        penstock.save_checkpoint(folder / "save-1", pipe, optimizer if mesh.stage == 0 else None)
    except penstock.PenstockError as error:
        found.append(f"{type(error).__name__}: {error}")
    optimizer.param_groups[0]["plan"] = {9: 0.1, 10: 0.2}
    penstock.save_checkpoint(folder / "save-2", pipe, optimizer)
    penstock.load_checkpoint(folder / "save-2", pipe, optimizer)
    assert optimizer.param_groups[0]["plan"] == {"9": 0.1, "10": 0.2}
    found.append("dict of numbers came back")
    captured = penstock.Pipeline(
        Normed(), mesh=mesh, example_inputs=torch.randn(4, 2), loss=nn.MSELoss()
    )
    captured.train_step(torch.randn(4, 2), torch.randn(4, 2))
    penstock.save_checkpoint(folder / "save-normed", captured)
    penstock.load_checkpoint(folder / "save-normed", captured)
    try:
        if mesh.stage == 0:
            penstock.save_checkpoint(folder / "save-3", pipe, optimizer)
        else:
            pipe.train_step(torch.ones(1, 2), torch.ones(1, 2))
    except penstock.PenstockError as error:
        found.append(f"{type(error).__name__}: {error}")
    return found


def masters(mesh: penstock.Mesh, folder_for_saves: str) -> list[bool]:
    """Save and load float32 copies of bfloat16 parameters, plainly and shared out over replicas;
    tell whether each came back to the bit.
    """
    found: list[bool] = []
    for kind in (penstock.zero_optimizer, lambda pipe, make: make(pipe.parameters())):
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)).bfloat16()
        pipe = penstock.Pipeline(layers, mesh=mesh, loss=lambda out, y: out.float().sum())
        first, second = kind(pipe, Masters), kind(pipe, Masters)
        pipe.train_step(torch.ones(2, 4, dtype=torch.bfloat16), torch.ones(2))
        first.step()
        saved = Path(folder_for_saves) / f"masters-{len(found)}"
        penstock.save_checkpoint(saved, pipe, first)
        penstock.load_checkpoint(saved, pipe, second)
        assert first.state.keys() == second.state.keys()
        found += [
            same_bits(state["master.50%"], second.state[parameter]["master.50%"])
            for parameter, state in first.state.items()
        ]
    return found


def slow_reader(mesh: penstock.Mesh) -> list[int]:
    """Work for longer than the deadline of a wait in one process; give what each gets."""
    assert mesh.background is not None
    mesh.background.timeout_s = 2.0

    def work(slow: int) -> int:
        threading.Event().wait(5.0 if mesh.rank == slow else 0.0)
        return slow

    return [mesh.work(partial(work, slow), "for the work") for slow in (0, 1)]
