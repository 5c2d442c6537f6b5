"""Saves that processes do not make alike, or of odd values; called in two processes."""

import threading
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from torch import nn

import penstock
from penstock.checkpoint.together import Saving, write_together
from penstock.mesh import background
from tests.model_parts import Masters, Noted, noted_pipeline
from tests.side_by_side import same_bits


def work(mesh: penstock.Mesh, folder_for_saves: str) -> list[str]:
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
    try:
        penstock.save_checkpoint(folder / "no\0name", pipe, optimizer)
    except penstock.PenstockError as error:
        found.append(f"{type(error).__name__}: {error}")
    optimizer.param_groups[0]["plan"] = {9: 0.1, 10: 0.2}
    penstock.save_checkpoint(folder / "save-2", pipe, optimizer)
    penstock.load_checkpoint(folder / "save-2", pipe, optimizer)
    assert optimizer.param_groups[0]["plan"] == {"9": 0.1, "10": 0.2}
    found.append("dict of numbers came back")
    _save_captured(mesh, folder)
    pipe.train_step(torch.ones(1, 2), torch.ones(1, 2))
    penstock.save_checkpoint(folder / "save-other", pipe, optimizer)
    try:
        penstock.load_checkpoint(
            folder / ("save-2" if mesh.stage == 0 else "save-other"), pipe, optimizer
        )
    except penstock.PenstockError as error:
        found.append(f"{type(error).__name__}: {error}")
    try:
        if mesh.stage == 0:
            penstock.save_checkpoint(folder / "save-3", pipe, optimizer)
        else:
            pipe.train_step(torch.ones(1, 2), torch.ones(1, 2))
    except penstock.PenstockError as error:
        found.append(f"{type(error).__name__}: {error}")
    return found


def _save_captured(mesh: penstock.Mesh, folder: Path) -> None:
    """Save and load a captured model with buffers and notes on each of two stages.

    What a process notes in the block of the other one is not to be saved.
    """
    model = Noted({"rank": mesh.rank}, torch.tensor([mesh.rank]), "of all")
    captured = noted_pipeline(model, mesh=mesh, num_stages=None)
    captured.train_step(torch.randn(4, 2), torch.randn(4, 2))
    penstock.save_checkpoint(folder / "save-noted", captured)
    penstock.save_pretrained(folder / "save-pretrained", captured)
    for path, load in (
        ("save-noted", penstock.load_checkpoint),
        ("save-pretrained", lambda path, pipe: penstock.load_pretrained(path, pipe)),
    ):
        own = model.second if mesh.rank else model.first
        saved, own.note, model.note = own.note, "another", "another"
        load(folder / path, captured)
        assert (own.note, model.note) == (saved, "of all")


def masters(mesh: penstock.Mesh, folder_for_saves: str) -> list[bool]:
    """Save and load float32 copies of bfloat16 parameters, whole and cut along replicas; tell
    whether each came back to the bit.
    """
    found: list[bool] = []
    for sharding in (None, "zero1"):
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)).bfloat16()
        loss = lambda out, y: out.float().sum()  # noqa: E731 - it is of this place alone
        pipe = penstock.Pipeline(layers, mesh=mesh, loss=loss, sharding=sharding)
        first, second = Masters(pipe.parameters()), Masters(pipe.parameters())
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
    mesh.background.timeout_s = 2.0

    def work(slow: int) -> int:
        threading.Event().wait(3.0 if mesh.rank == slow else 0.0)
        return slow

    return [mesh.world.work(partial(work, slow), "for the work") for slow in (0, 1)]


def slow_writers(mesh: penstock.Mesh, folder_for_saves: str) -> bool:
    """Write for longer than the deadline of a wait: rank 1 its part of a folder, beside which the
    processes go on; then rank 0 the end of another one, which the mesh waits for as it closes.

    Return whether the first folder is there as soon as it was waited for.
    """
    mesh.background.timeout_s = 2.0
    background._PATIENCE_S = 0.5  # of which closing grants each of its threads one
    first, second = (Path(folder_for_saves) / f"slow-{n}" for n in (1, 2))

    def write(path: Path, unfinished: Path) -> dict[str, str]:
        threading.Event().wait(3.5 if (mesh.rank, path) == (1, first) else 0.0)
        (unfinished / str(mesh.rank)).touch()
        return {str(mesh.rank): ""}

    def finish(path: Path, unfinished: Path, written: Mapping[str, str]) -> None:
        threading.Event().wait(4.0 if path == second else 0.0)
        (unfinished / "written").write_text(" ".join(sorted(written)))

    def save(path: Path) -> Saving:
        return write_together(
            mesh, path, lambda _: None, partial(write, path), partial(finish, path)
        )

    saves = [save(path) for path in (first, second)]
    assert mesh.world.gather(mesh.rank, "for the others to go on") == [0, 1]
    saves[0].wait()
    return first.is_dir()
