"""A checkpoint knows nothing of who saved it: any stages and replicas load any other's."""

import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import penstock
from penstock import schedules
from penstock.checkpoint.files import read_state
from penstock.checkpoint.together import Saving, write_together
from penstock.errors import CheckpointError
from penstock.mesh import background
from tests.distributed.call import call
from tests.model_parts import Noted, noted_pipeline
from tests.side_by_side import same_bits

MICROBATCHES = 4  # of all replicas


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    first: list[Any] = [nn.Linear(6, 8), nn.Sequential(nn.BatchNorm1d(8), nn.Dropout(0.2))]
    return [*first, nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 3)]


def batch(step: int, replica: int, num_replicas: int) -> tuple[Tensor, Tensor]:
    """Give a replica's share of a step's mini-batch."""
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(16, 6, generator=generator), torch.randn(16, 3, generator=generator)
    return x.chunk(num_replicas)[replica], y.chunk(num_replicas)[replica]  # torch's own word


class Run:
    """A pipeline of `stages_per_rank` stages in each process, and its optimizer; if it is
    `shared`, each replica keeps slices of weights and state.
    """

    def __init__(
        self, mesh: penstock.Mesh, seed: int = 0, *, shared: str = "", stages_per_rank: int = 1
    ) -> None:
        self.mesh, per_rank = mesh, stages_per_rank
        self.pipe = penstock.Pipeline(
            layers(),
            mesh=mesh,
            schedule=schedules.interleaved_1f1b(per_rank) if per_rank > 1 else schedules.gpipe,
            num_microbatches=MICROBATCHES // mesh.num_replicas,
            loss=nn.MSELoss(),
            threads_per_stage=1,
            seed=seed,
            batch_norm_over_replicas=mesh.num_replicas > 1,
            sharding="zero1" if shared and mesh.num_replicas > 1 else None,
        )
        self.optimizer = torch.optim.AdamW(self.pipe.parameters(), lr=0.05)

    def step(self) -> float:
        loss = self.pipe.train_step(
            *batch(self.pipe.step, self.mesh.replica, self.mesh.num_replicas)
        )
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss)


def finish(run: Run) -> list[float]:
    return [run.step() for _ in range(2)]


def work(
    mesh: penstock.Mesh, action: str, folders: list[str], **options: Any
) -> list[list[float]]:
    """Save a checkpoint in the first folder, if asked to, and load the others; give the losses
    after each.

    Both train two steps before and two after the checkpoint.
    """
    found, loaded = list[list[float]](), folders
    if action == "save":
        loaded, run = folders[1:], Run(mesh, **options)
        run.step(), run.step()
        penstock.save_checkpoint(folders[0], run.pipe, run.optimizer, note="hello")
        found.append(finish(run))
    for folder in loaded:
        run = Run(mesh, seed=5, **options)
        state: dict[str, Any] = penstock.load_checkpoint(folder, run.pipe, run.optimizer)
        assert state == {"note": "hello"}
        found.append(finish(run))
    assert all(Path(folder).is_dir() for folder in folders)
    return found


def refusals(mesh: penstock.Mesh, paths: list[str]) -> list[str]:
    """Load checkpoints; give the errors."""
    found = []
    for path in paths:
        with pytest.raises(CheckpointError) as caught:
            work(mesh, "load", [path])
        found.append(str(caught.value))
    return found


LAYOUTS = ((1, 1, ""), (2, 1, ""), (4, 1, ""), (2, 2, ""), (2, 2, "1"))
"""Stages, replicas, and whether these share out the optimizer's state."""


def losses(
    stages: int,
    replicas: int,
    action: str,
    folders: list[Path],
    shared: str = "",
    *,
    stages_per_rank: int = 1,
) -> list[list[float]]:
    """Save or load in processes; all ranks must find the same losses."""
    arguments: dict[str, Any] = {
        "action": action,
        "folders": list(map(str, folders)),
        "shared": shared,
        "stages_per_rank": stages_per_rank,
    }
    with TemporaryDirectory() as results:
        found = call(work, (stages, replicas), Path(results), **arguments)
    assert all(of_rank == found[0] for of_rank in found)
    return list(found[0])


def same(a: list[float], b: list[float], *, bits: bool) -> bool:
    return a == b if bits else a == pytest.approx(b, rel=1e-5)


@pytest.mark.parametrize("stages_per_rank", (1, pytest.param(2, marks=pytest.mark.slow)))
def test_two_processes_and_one_go_on_bit_by_bit_with_what_the_other_saved(
    stages_per_rank: int, tmp_path: Path
) -> None:
    one = Run(penstock.init_mesh(2))
    one.step(), one.step()
    penstock.save_checkpoint(tmp_path / "one", one.pipe, one.optimizer, note="hello")
    folders = [tmp_path / "two", tmp_path / "one"]
    saved, loaded = losses(2, 1, "save", folders, stages_per_rank=stages_per_rank)
    assert loaded == finish(one)
    here = Run(penstock.init_mesh(3), seed=5)
    penstock.load_checkpoint(tmp_path / "two", here.pipe, here.optimizer)
    assert finish(here) == saved
    here.pipe.close()
    one.pipe.close()
    penstock.export_model(tmp_path / "two", tmp_path / "model.safetensors")
    unsplit = nn.Sequential(*layers())
    unsplit.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert {path.name for path in tmp_path.iterdir()} == {"one", "two", "model.safetensors"}
    check_files_are_noted(tmp_path / "two", num_files=5)


def check_files_are_noted(folder: Path, num_files: int) -> None:
    """See that a checkpoint is few files, and tells which tensors each of them holds."""
    noted = read_state(folder)[0]["files"]
    there = {file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()}
    assert there == {*noted, "state.json"} and len(there) == num_files
    assert all(load_file(folder / file).keys() == set(names) for file, names in noted.items())


@pytest.mark.slow
def test_who_has_read_its_part_waits_without_a_deadline_for_who_has_not(tmp_path: Path) -> None:
    assert call(slow_reader, (2, 1), tmp_path) == [[0, 1], [0, 1]]


@pytest.mark.slow
def test_saves_may_take_longer_than_the_deadline_of_a_wait(tmp_path: Path) -> None:
    assert call(slow_writers, (2, 1), tmp_path, folder_for_saves=str(tmp_path)) == [
        True,
        True,
    ]
    for name in ("slow-1", "slow-2"):
        assert (tmp_path / name / "written").read_text() == "0 1"


@pytest.mark.slow
def test_damage_that_one_finds_and_another_model_are_refused_by_all_with_names_and_shapes(
    tmp_path: Path,
) -> None:
    losses(2, 1, "save", [tmp_path / "two"])
    shard = tmp_path / "two" / "optimizer" / "shard-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    other = layers()
    other[2] = nn.Sequential(nn.Linear(8, 9), nn.Tanh())
    other[3] = nn.Linear(9, 3, bias=False)
    penstock.save_checkpoint(tmp_path / "other", nn.Sequential(*other))
    paths = [str(tmp_path / name) for name in ("two", "other")]
    for damaged, said in call(refusals, (2, 1), tmp_path, paths=paths):
        assert "optimizer/shard-00002.safetensors is damaged" in damaged, damaged
        for fault in (
            "2.0.weight is float32 [9, 8], the model's is float32 [8, 8]",
            "3.weight is float32 [3, 9], the model's is float32 [3, 8]",
            "3.bias is missing",
        ):
            assert fault in said, said


def test_what_cannot_be_saved_together_is_one_error_on_all(tmp_path: Path) -> None:
    """Only one rank has an optimizer; two load different checkpoints; only one rank saves."""
    first, second = call(save_oddly, (2, 1), tmp_path, folder_for_saves=str(tmp_path))
    assert first[0] == second[0]
    assert first[0].startswith("CheckpointError: rank 1 saves without an optimizer")
    said = first.pop(1)
    assert said == second.pop(1) and "CheckpointError: cannot write the checkpoint" in said
    assert "rank 0: embedded null byte" in said and "embedded null" in said
    assert first[1] == second[1] == "dict of numbers came back"
    other = str(tmp_path / "save-other")
    assert first[2] == second[2]
    assert f"rank 0 {tmp_path / 'save-2'}, rank 1 {other}, which differs from it" in first[2]
    both = "rank 0 began save_checkpoint and rank 1 began train_step"
    assert all(both in said for said in (first[3], second[3])), (first[3], second[3])
    names = {"save-2", "save-other", "save-noted", "save-pretrained"}
    assert {path.name for path in tmp_path.glob("*save*")} == names
    model = Noted()
    penstock.load_checkpoint(tmp_path / "save-noted", model)
    assert model.notes == ({"rank": 0}, torch.tensor([1]), "of all"), "each of who runs the block"
    model = Noted()
    noted_pipeline(model, weights=tmp_path / "save-pretrained").close()
    assert model.notes == ({"rank": 0}, torch.tensor([1]), "of all")


def test_optimizer_state_of_another_type_than_its_parameter_comes_back_to_the_bit(
    tmp_path: Path,
) -> None:
    """Of weights that are whole, and of slices."""
    first, second = call(masters, (1, 2), tmp_path, folder_for_saves=str(tmp_path))
    count = 2 * 6 * 4  # the 6 parameters, twice, each with 4 values
    assert (len(first), len(second)) == (count, count)
    assert all(first) and all(second)


@pytest.mark.slow
def test_replicas_of_several_stages_share_out_the_optimizers_state(tmp_path: Path) -> None:
    (expected,) = losses(2, 2, "save", [tmp_path / "eight"], "1", stages_per_rank=2)
    for stages, per_rank in ((2, 2), (1, 4), (2, 1)):
        found = losses(stages, 2, "load", [tmp_path / "eight"], "1", stages_per_rank=per_rank)
        assert found == [expected]


@pytest.mark.slow
def test_every_layout_loads_every_other(tmp_path: Path) -> None:
    folders = [tmp_path / f"{stages}x{replicas}{shared}" for stages, replicas, shared in LAYOUTS]
    saved = [
        losses(stages, replicas, "save", [folder], shared)[0]
        for (stages, replicas, shared), folder in zip(LAYOUTS, folders, strict=True)
    ]
    assert all(same(row, saved[0], bits=False) for row in saved)
    for stages, replicas, shared in LAYOUTS:
        found = losses(stages, replicas, "load", folders, shared)
        for (_, of_saved, _), before, after in zip(LAYOUTS, saved, found, strict=True):
            assert same(before, after, bits=of_saved == replicas), (
                stages,
                replicas,
                before,
                after,
            )


def save_oddly(mesh: penstock.Mesh, folder_for_saves: str) -> list[str]:
    folder = Path(folder_for_saves)
    torch.manual_seed(0)
    layers = [nn.Linear(2, 2), nn.Linear(2, 2)]
    pipe = penstock.Pipeline(layers, mesh=mesh, loss=nn.MSELoss(), num_microbatches=1)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    found, save = list[str](), penstock.save_checkpoint
    found += said_by(save, folder / "save-1", pipe, optimizer if mesh.stage == 0 else None)
    found += said_by(save, folder / "no\0name", pipe, optimizer)
    optimizer.param_groups[0]["plan"] = {9: 0.1, 10: 0.2}
    penstock.save_checkpoint(folder / "save-2", pipe, optimizer)
    penstock.load_checkpoint(folder / "save-2", pipe, optimizer)
    assert optimizer.param_groups[0]["plan"] == {"9": 0.1, "10": 0.2}
    found.append("dict of numbers came back")
    _save_captured(mesh, folder)
    pipe.train_step(torch.ones(1, 2), torch.ones(1, 2))
    penstock.save_checkpoint(folder / "save-other", pipe, optimizer)
    other = folder / ("save-2" if mesh.stage == 0 else "save-other")
    found += said_by(penstock.load_checkpoint, other, pipe, optimizer)
    if mesh.stage == 0:
        return found + said_by(save, folder / "save-3", pipe, optimizer)
    return found + said_by(pipe.train_step, torch.ones(1, 2), torch.ones(1, 2))


def said_by(call: Callable[..., Any], *arguments: Any) -> list[str]:
    try:
        call(*arguments)
    except penstock.PenstockError as error:
        return [f"{type(error).__name__}: {error}"]
    return []


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
    """Save and load main weights of bfloat16 parameters, whole and cut along replicas; tell
    whether each came back to the bit.
    """
    found: list[bool] = []
    for sharding in (None, "zero1"):
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)).bfloat16()
        loss = lambda out, y: out.float().sum()  # noqa: E731 - it is of this place alone
        pipe = penstock.Pipeline(
            *(layers,),
            mesh=mesh,
            loss=loss,
            sharding=sharding,
            num_microbatches=1,
            gradient_dtype=torch.float32,
        )
        make = partial(penstock.MainWeights, torch.optim.AdamW)
        first, second = make(pipe.parameters()), make(pipe.parameters())
        pipe.train_step(torch.ones(2, 4, dtype=torch.bfloat16), torch.ones(2))
        first.step()
        saved = Path(folder_for_saves) / f"masters-{len(found)}"
        penstock.save_checkpoint(saved, pipe, first)
        penstock.load_checkpoint(saved, pipe, second)
        assert first.state.keys() == second.state.keys()
        found += [
            same_bits(value, second.state[parameter][name])
            for parameter, state in first.state.items()
            for name, value in state.items()
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
