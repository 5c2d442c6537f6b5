"""A calibration is kept in a file, and a job that the file is not for measures again."""

import json
import os
import re
from pathlib import Path

import pytest
import torch

import penstock
from penstock.doctor.calibration import Calibration, remembered
from penstock.doctor.calibration.figures import Figure, Spread
from penstock.doctor.calibration.remembered import facts_of, path_of
from tests.few_devices import cluster


class Measuring:
    """Counts calibrations, each of which finds another speed."""

    def __init__(self) -> None:
        self.count, self.had_core, self.high = 0, 1.0, 2.0

    def __call__(self, budget_s: float) -> Calibration:
        self.count += 1
        found = cluster(2, torch_type="cpu", bytes_per_s=float(self.count))
        copy = Figure("copy", "B/s", Spread(1.0, 0.5, self.high))
        return Calibration(cluster=found, figures=(copy,), had_core=self.had_core)


@pytest.fixture
def measuring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Measuring:
    """Measure nothing, in an empty cache."""
    own = Measuring()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(remembered, "calibrate", own)
    monkeypatch.setattr(remembered, "_MEASURED", {})
    return own


def speed(num_devices: int = 2, *, renew: bool = False) -> float:
    """Return the number of the calibration that a job uses."""
    found = penstock.measure_cluster(num_devices, renew=renew)
    assert len(found.places) == num_devices
    return found.device_of(0).bytes_per_s


def begin_another_process() -> None:
    remembered._MEASURED.clear()


@pytest.mark.parametrize(
    ("name", "doubtful", "usual"), [("had_core", 0.5, 1.0), ("high", 3.0, 2.0)]
)
def test_figures_measured_beside_other_programs_are_not_kept(
    name: str, doubtful: float, usual: float, measuring: Measuring
) -> None:
    setattr(measuring, name, doubtful)
    assert speed() == speed() == 1
    begin_another_process()
    setattr(measuring, name, usual)
    assert speed() == 2
    begin_another_process()
    assert (speed(), measuring.count) == (2, 2)


def test_a_machine_is_measured_once_unless_asked(measuring: Measuring, tmp_path: Path) -> None:
    assert speed() == speed() == 1
    begin_another_process()
    assert speed() == 1
    assert [path.suffix for path in (tmp_path / "penstock/calibrations").iterdir()] == [".toml"]
    assert speed(renew=True) == 2
    begin_another_process()
    assert (speed(), measuring.count) == (2, 2)


@pytest.mark.parametrize(
    "change",
    [
        "penstock.doctor.calibration.remembered.package_version",
        "penstock.doctor.calibration.remembered.processor_name",
        "penstock.doctor.calibration.remembered.num_usable_cores",
        "penstock.doctor.calibration.remembered.memory_bytes",
        "torch.get_num_threads",
        "torch.__version__",
        "torch.cuda",
        "processes",
    ],
)
def test_what_changes_the_figures_changes_the_file(
    change: str, measuring: Measuring, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = path_of(facts_of(2))
    assert speed() == 1
    if change == "torch.__version__":
        monkeypatch.setattr(change, "0")
    elif change == "torch.cuda":
        monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
        monkeypatch.setattr("torch.cuda.get_device_name", lambda n: f"gpu {n}")
    elif change != "processes":
        monkeypatch.setattr(change, lambda: 99)
    count = 3 if change == "processes" else 2
    assert path_of(facts_of(count)) != first
    assert (speed(count), speed(count)) == (2, 2)


@pytest.mark.parametrize("text", ["", "name = ", "\xff", "of another machine", "cut off"])
def test_a_file_that_is_not_of_this_machine_is_named_and_replaced(
    text: str, measuring: Measuring
) -> None:
    path = path_of(facts_of(2))
    speed()
    whole = path.read_text()
    changed = {
        "of another machine": whole.replace(torch.__version__, "0.1"),
        "cut off": whole[: len(whole) // 2],
    }
    path.write_bytes(changed.get(text, text).encode("latin-1"))
    begin_another_process()
    with pytest.warns(UserWarning, match=f"{re.escape(str(path))}: it has no calibration of th"):
        assert speed() == 2
    assert path.read_text() == whole.replace("bytes_per_s = 1.0\n", "bytes_per_s = 2.0\n")


def test_without_a_folder_to_write_to_a_process_measures_once_and_says_so(
    measuring: Measuring, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="cannot be kept there: Not a directory") as said:
        assert speed() == speed() == 1
    assert len(said) == 1


def test_a_file_is_replaced_whole_or_not_at_all(
    measuring: Measuring, monkeypatch: pytest.MonkeyPatch
) -> None:
    speed()
    path = path_of(facts_of(2))
    before = path.read_text()

    def fill_disk(self: penstock.Cluster, file: Path, comment: str) -> None:
        file.write_text("name =")
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(penstock.Cluster, "save", fill_disk)
    with pytest.warns(UserWarning, match="No space left"):
        assert speed(renew=True) == 2
    assert (path.read_text(), len([*path.parent.iterdir()])) == (before, 1)


def test_the_folder_is_the_users_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    for given in ("", "a/relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", given)
        folder = path_of(facts_of(1)).parent
        assert folder == Path("/home/me/.cache/penstock/calibrations")
    assert json.loads(facts_of(5))["processes"] == 5
