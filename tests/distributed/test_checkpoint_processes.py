"""A checkpoint knows nothing of who saved it: any stages and replicas load any other's."""

from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import nn

import penstock
from tests.distributed.checkpoint_job import Run, finish, layers
from tests.distributed.launch import run

LAYOUTS = ((1, 1), (2, 1), (4, 1), (2, 2))


def losses(stages: int, replicas: int, action: str, folders: list[Path]) -> list[list[float]]:
    """Run the job; all ranks must say the same."""
    names = ",".join(map(str, folders))
    module = "tests.distributed.checkpoint_job"
    ended = run(stages * replicas, ["-m", module, str(stages), str(replicas), action, names])
    lines = [[x for x in e.output.splitlines() if x.startswith("LOSSES")] for e in ended]
    assert all(said == lines[0] for said in lines)
    assert len(lines[0]) == len(folders)
    return [[float.fromhex(word) for word in line.split()[1:]] for line in lines[0]]


def same(a: list[float], b: list[float], *, bits: bool) -> bool:
    return a == b if bits else a == pytest.approx(b, rel=1e-5)


def test_two_processes_save_and_one_process_goes_on_bit_by_bit(tmp_path: Path) -> None:
    (expected,) = losses(2, 1, "save", [tmp_path / "two"])
    here = Run(penstock.init_mesh(3), seed=5)
    penstock.load_checkpoint(tmp_path / "two", here.pipe, here.optimizer)
    assert [float.fromhex(word) for word in finish(here).split()] == expected
    here.pipe.close()
    penstock.export_model(tmp_path / "two", tmp_path / "model.safetensors")
    unsplit = nn.Sequential(*layers())
    unsplit.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert {path.name for path in tmp_path.iterdir()} == {"two", "model.safetensors"}


def test_one_process_saves_and_two_load_it_or_say_what_does_not_fit(tmp_path: Path) -> None:
    here = Run(penstock.init_mesh(2))
    here.step(), here.step()
    penstock.save_checkpoint(tmp_path / "one", here.pipe, here.optimizer, note="hello")
    expected = [float.fromhex(word) for word in finish(here).split()]
    here.pipe.close()
    assert losses(2, 1, "load", [tmp_path / "one"]) == [expected]


@pytest.mark.slow
def test_every_layout_loads_every_other(tmp_path: Path) -> None:
    folders = [tmp_path / f"{stages}x{replicas}" for stages, replicas in LAYOUTS]
    saved = [
        losses(*layout, "save", [folder])[0]
        for layout, folder in zip(LAYOUTS, folders, strict=True)
    ]
    assert all(same(row, saved[0], bits=False) for row in saved)
    for layout in LAYOUTS:
        found = losses(*layout, "load", folders)
        for (_, replicas), before, after in zip(LAYOUTS, saved, found, strict=True):
            assert same(before, after, bits=replicas == layout[1]), (layout, before, after)
