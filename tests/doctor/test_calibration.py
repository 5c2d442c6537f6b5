"""Measuring this machine: what a calibration holds, and how figures are made of times."""

import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from penstock.cli.main import run
from penstock.costs.cluster import Cluster, Device, Host
from penstock.doctor.calibration.calibrate import (
    Calibration,
    DeviceFacts,
    calibrate,
    measure_device,
)
from penstock.doctor.calibration.figures import (
    TINY,
    Figure,
    Spread,
    comment_of,
    rates,
    seconds_of,
    share_at,
    shares_alone,
)
from penstock.doctor.calibration.links import MeasuredLink, measure_threads
from penstock.doctor.calibration.remembered import facts_of, path_of
from penstock.planner.shared_cores import num_cores

CPU = torch.device("cpu")
Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


def sure(seconds: float) -> Spread:
    return Spread(seconds, seconds, seconds)


@pytest.mark.slow
def test_a_calibration_is_a_cluster_that_a_file_gives_again(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    found = calibrate(0.2, TINY)
    assert torch.get_num_threads() == before
    cluster = found.cluster
    cluster.save(tmp_path / "cluster.toml", comment_of(found))
    assert Cluster.load(tmp_path / "cluster.toml") == cluster
    if torch.cuda.is_available():
        return
    assert "processes: a small message" in (tmp_path / "cluster.toml").read_text()
    cores = len(cluster.hosts[0].devices)
    assert 1 <= cores <= num_cores()
    assert {*cluster.hosts[0].devices} == {"core"}
    assert len(cluster.hosts[0].busy_speed) == cores
    if cores > 1:
        assert cluster.between_processes().route(0, 1) != cluster.route(0, 1)
        assert all(link.overhead_s > 0 for link in cluster.links.values())


def test_a_calibration_on_a_busy_machine_says_so() -> None:
    device = Device(name="a", flops_per_s={"float32": 1.0}, bytes_per_s=1, memory_bytes=1)
    cluster = Cluster(
        name="x", devices={"a": device}, hosts=(Host(name="h", devices=("a",)),), links={}
    )
    busy = Calibration(cluster=cluster, figures=(), had_core=0.5)
    assert "had a core for 50% of the time" in busy.warning
    assert "stop other programs and calibrate again" in comment_of(busy)
    assert Calibration(cluster=cluster, figures=(), had_core=0.99).warning == ""
    steady = Figure("copies", "B/s", Spread(1.0, 0.9, 1.2))
    swung = Figure("products", "FLOP/s", Spread(1.0, 0.1, 7.0))
    found = Calibration(cluster=cluster, figures=(steady, swung), had_core=0.99)
    assert "products 70.0 times" in found.warning and "calibrate again" in found.warning
    assert "copies" not in found.warning
    assert Calibration(cluster=cluster, figures=(steady,), had_core=0.99).warning == ""


def test_a_device_has_the_peak_that_its_product_reached() -> None:
    device, figures = measure_device(CPU, DeviceFacts("x", 1000, "here"), TINY, 0.1)
    found = {f.name: f.spread.middle for f in figures}
    assert device.flops_per_s["float32"] == pytest.approx(found["product float32"], rel=1e-3)
    assert device.bytes_per_s == pytest.approx(found["copy"], rel=1e-3)
    assert device.efficiency["gemm"] == 1
    assert (device.name, device.memory_bytes, device.torch_type) == ("x", 1000, "cpu")
    assert device.issue_s == device.gap_s != 0


def test_times_are_repeated_and_given_as_median_and_quartiles() -> None:
    calls: list[int] = []
    spread = seconds_of(lambda: calls.append(1), 0.0)
    assert len(calls) >= 5
    assert spread.low <= spread.middle <= spread.high
    assert Spread.of([4.0, 1.0, 3.0, 2.0, 5.0]) == Spread(3, 2, 4)
    assert Spread(2.0, 1.0, 4.0).per(8) == Spread(4, 2, 8)


def test_threads_work_at_the_same_time() -> None:
    meeting = threading.Barrier(3, timeout=30)
    found = rates(lambda: meeting.wait, 3, 0.0)
    assert len(found) == 3


def test_what_fails_in_a_thread_is_raised_as_itself() -> None:
    def make() -> Callable[[], object]:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        rates(make, 2, 0.0)


def test_shares_are_of_one_thread_alone_and_between_measured_numbers_on_a_line() -> None:
    shares = shares_alone(lambda: lambda: sum(range(1000)), 6, 0.1)
    assert [*shares] == [1, 2, 4, 6]
    assert shares[1] == sure(1.0)
    assert all(0 < share.middle <= 1 for share in shares.values())
    assert [*shares_alone(lambda: lambda: None, 1, 0.0)] == [1]
    known = {1: sure(1.0), 4: sure(0.7)}
    assert [share_at(known, n) for n in (1, 2, 4)] == pytest.approx([1.0, 0.9, 0.7])


def test_handing_over_between_threads_takes_time_and_copies_nothing() -> None:
    link = measure_threads(1 << 16, 0.05).link("here")
    assert link.overhead_s > 0
    assert link.duplex
    assert link.copy_bytes_per_s is None


@pytest.mark.parametrize(("crossing_s", "duplex"), [(1.1e-3, True), (1.9e-3, False)])
def test_a_link_is_made_of_what_messages_took(crossing_s: float, duplex: bool) -> None:
    measured = MeasuredLink(
        num_bytes=900_000,
        small_s=sure(1e-4),
        large_s=sure(1e-3),
        crossing_s=sure(crossing_s),
        overhead_s=sure(2e-5),
        busy_s=sure(3.2e-4),
        collective_s=sure(3e-3),
    )
    link = measured.link("here")
    assert link.bytes_per_s == pytest.approx(1e9)
    assert link.collective_s == pytest.approx(3e-3 - 2e-4)  # of which two small messages
    assert link.latency_s == pytest.approx(6e-5)
    assert (link.duplex, link.overhead_s, link.copy_bytes_per_s) == (duplex, 2e-5, 3e9)


def test_what_bytes_take_is_no_less_than_the_measurement_can_tell() -> None:
    spread = Spread(1e-4, 0.9e-4, 1.1e-4)
    measured = MeasuredLink(1000, sure(1e-4), spread, sure(0.0))
    assert measured.link("").bytes_per_s == pytest.approx(1000 / 1e-5)


@pytest.mark.slow
def test_the_command_measures_prints_and_saves(tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "cluster.toml"
    assert run(["doctor", "--calibrate", "--budget", "1", "--save", str(path)]) == 0
    assert f"written to {path}" in capsys.readouterr().out
    saved = Cluster.load(path)
    assert run(["doctor", "--calibrate", "--budget", "1", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["cluster"]["hosts"][0]["devices"] == list(saved.hosts[0].devices)
    assert {"name", "unit", "middle", "low", "high"} == {*told["figures"][0]}


def test_the_command_keeps_the_figures_for_jobs_of_so_many_processes(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    device = Device(name="core", flops_per_s={"float32": 1.0}, bytes_per_s=1, memory_bytes=1)
    hosts = (Host(name="mine", devices=("core",)),)
    found = Cluster(name="mine", devices={"core": device}, hosts=hosts, links={})
    figure = Figure("copy", "B/s", sure(1.0))
    measured = Calibration(cluster=found, figures=(figure,))
    monkeypatch.setattr("penstock.doctor.calibration.calibrate", lambda budget_s: measured)
    for words, count in (([], 1), (["--num-processes", "3"], 3)):
        assert run(["doctor", "--calibrate", *words]) == 0
        assert Cluster.load(path_of(facts_of(count))) == found
    assert not path_of(facts_of(2)).exists()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--save", "c.toml"], "--save is for --calibrate"),
        (["--calibrate", "--save", "absent/c.toml"], "absent/c.toml: it cannot be written: No"),
        (["--calibrate", "--save", "."], "is a directory"),
        (["--calibrate", "--save", "/proc/c.toml"], "it cannot be written"),
        (["--calibrate", "--budget", "0"], "--budget"),
    ],
)
def test_what_cannot_be_calibrated_is_said_at_once(
    words: list[str],
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Captured,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["doctor", *words]) == 2
    assert expected in capsys.readouterr().err


def test_a_process_of_a_job_does_not_calibrate(monkeypatch, capsys) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert run(["doctor", "--calibrate"]) == 2
    assert "without torchrun" in capsys.readouterr().err
