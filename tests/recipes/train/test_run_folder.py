"""A run folder is never overwritten, and what a crash left in it is no obstacle."""

from pathlib import Path

import pytest

from penstock_recipes.errors import RunFolderError
from penstock_recipes.train.run_folder import (
    RunFolder,
    check_free,
    create,
    create_numbered,
    numbered,
    open_existing,
)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return create(tmp_path / "run", "toml")


def test_an_existing_run_folder_is_never_overwritten(folder: RunFolder) -> None:
    for refuse in (lambda: create(folder.path, "other"), lambda: check_free(folder.path)):
        with pytest.raises(RunFolderError, match=f"--resume {folder.path}, or choose another"):
            refuse()
    assert folder.recipe_path.read_text() == "toml"


def test_a_folder_or_file_that_is_no_run_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path, tmp_path / "file"):
        with pytest.raises(RunFolderError, match=r"exists already and is no run folder; choose"):
            create(path, "toml")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_place_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match=r"cannot make the run folder .*file/run"):
        create(tmp_path / "file" / "run", "toml")


def test_numbered_folders_take_the_next_free_number(tmp_path: Path) -> None:
    names = [create_numbered(tmp_path / "runs", "digits", "toml").path.name for _ in range(3)]
    assert names == ["digits-1", "digits-2", "digits-3"]


@pytest.mark.parametrize("name, why", [("no", "does not exist"), (".", "holds no recipe")])
def test_only_a_run_folder_can_be_resumed(tmp_path: Path, name: str, why: str) -> None:
    with pytest.raises(RunFolderError, match=f"cannot resume: .* {why}.*; give the run folder"):
        open_existing(tmp_path / name)


def test_resuming_drops_the_lines_after_the_checkpoint(folder: RunFolder) -> None:
    for step in range(1, 6):
        folder.append_metrics({"kind": "step", "step": step})
    folder.drop_metrics_after(3)
    assert [line["step"] for line in folder.read_metrics()] == [1, 2, 3]


def test_a_line_that_a_crash_cut_short_is_dropped(folder: RunFolder) -> None:
    folder.append_metrics({"kind": "step", "step": 1})
    with folder.metrics_path.open("a") as file:
        file.write('{"kind": "st')
    folder.drop_metrics_after(3)
    folder.append_metrics({"kind": "step", "step": 2})
    assert [line["step"] for line in folder.read_metrics()] == [1, 2]


DAMAGED = [
    b'{"kind": "st',
    b"[1, 2]",
    b"null",
    b'{"kind": "step"}',
    b'{"step": "4"}',
    b"\xff\xfe\x00",
    b"[" * 100_000,
]


def test_a_damaged_line_costs_none_of_the_others(folder: RunFolder) -> None:
    for step, line in enumerate(DAMAGED, start=1):
        folder.append_metrics({"kind": "step", "step": step, "at": "\x85\u2028"})
        with folder.metrics_path.open("ab") as file:
            file.write(line + b"\n")
    folder.append_metrics({"kind": "step", "step": 8})
    assert [metrics["step"] for metrics in folder.read_metrics()] == list(range(1, 9))
    assert folder.drop_metrics_after(7) == len(DAMAGED)
    assert [metrics["step"] for metrics in folder.read_metrics()] == list(range(1, 8))
    assert (folder.path / "metrics.damaged").read_bytes().splitlines() == DAMAGED
    assert folder.drop_metrics_after(7) == 0


def test_a_run_without_metrics_can_be_resumed(folder: RunFolder) -> None:
    folder.drop_metrics_after(0)
    assert list(folder.read_metrics()) == []


def test_only_the_newest_checkpoints_stay(folder: RunFolder) -> None:
    for step in (5, 40, 300, 1_000_000):
        folder.checkpoint_path(step).mkdir(parents=True)
    folder.keep_newest(2, every=5)
    assert folder.checkpoints() == [folder.checkpoint_path(300), folder.checkpoint_path(1_000_000)]


def test_checkpoints_of_interruptions_do_not_take_the_place_of_those_that_are_due(folder) -> None:
    for step in (10, 20, 23, 30, 37):
        folder.checkpoint_path(step).mkdir(parents=True)
    assert [path.name[-2:] for path in folder.due(10)] == ["10", "20", "30", "37"]
    folder.keep_newest(3, every=10)
    assert [path.name[-2:] for path in folder.checkpoints()] == ["20", "30", "37"]


def test_what_an_interrupted_save_left_is_cleared_and_never_listed(folder: RunFolder) -> None:
    folder.checkpoint_path(5).mkdir(parents=True)
    left = folder.path / "checkpoints" / ".step-000006.abc.unfinished"
    left.mkdir()
    assert folder.checkpoints() == [folder.checkpoint_path(5)]
    folder.keep_newest(2, every=5)
    assert not left.exists()


def test_a_new_recipe_replaces_the_old_one_whole(folder: RunFolder) -> None:
    folder.write_text("recipe.toml", "other")
    assert [path.name for path in folder.path.iterdir()] == ["recipe.toml"]
    assert folder.recipe_path.read_text() == "other"


def test_only_numbered_folders_are_checkpoints_and_runs(tmp_path: Path) -> None:
    folder = create(tmp_path / "a[1]-1", "")
    for name in ("step-000004", "step-000004-good", "step-12", "step-x", "damaged-step-000006"):
        (folder.path / "checkpoints" / name).mkdir(parents=True)
    assert [path.name for path in folder.checkpoints()] == ["step-000004", "step-12"]
    folder.set_aside(folder.checkpoints()[-1])
    assert [path.name for path in folder.checkpoints()] == ["step-000004"]
    assert (folder.path / "checkpoints" / "damaged-step-12").is_dir()
    create(tmp_path / "a[1]-large-1", "")
    assert numbered(tmp_path, "a[1]") == [folder.path]


def test_two_jobs_cannot_train_in_one_folder(folder: RunFolder) -> None:
    lock = folder.lock()
    assert lock is not None
    with pytest.raises(RunFolderError, match="another job trains in"):
        folder.lock()
    lock.release()
    again = folder.lock()
    assert again is not None
    again.release()


def test_metrics_that_cannot_be_read_are_named(folder: RunFolder) -> None:
    folder.metrics_path.mkdir()
    with pytest.raises(RunFolderError, match=r"cannot read .*metrics\.jsonl: Is a directory"):
        folder.drop_metrics_after(1)


def test_a_file_that_cannot_be_written_is_named(folder: RunFolder) -> None:
    (folder.path / "taken.json").mkdir()
    with pytest.raises(RunFolderError, match=r"cannot write .*taken\.json"):
        folder.write_text("taken.json", "{}")
