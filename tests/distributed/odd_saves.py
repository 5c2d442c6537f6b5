"""Saves that processes do not make alike, or of odd values; called in two processes."""

from pathlib import Path

import torch
from torch import nn

import penstock


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
    try:
        if mesh.stage == 0:
            penstock.save_checkpoint(folder / "save-3", pipe, optimizer)
        else:
            pipe.train_step(torch.ones(1, 2), torch.ones(1, 2))
    except penstock.PenstockError as error:
        found.append(f"{type(error).__name__}: {error}")
    return found
