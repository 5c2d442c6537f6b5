"""What the doctor concludes from what it found; that it stops where going on would hang."""

import importlib
import json
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.cli.main import run
from penstock.doctor.edges import Edge, check_edges, pairs
from penstock.doctor.examine import check_folder
from penstock.doctor.facts import RankFacts, gather_facts
from penstock.doctor.finding import Finding, Severity, has_error
from penstock.doctor.report import Report
from penstock.doctor.self_test import Outcome, SelfTest, judge
from penstock.doctor.settings import check_together

ERROR, WARNING = Severity.ERROR, Severity.WARNING
Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def ranks() -> list[RankFacts]:
    """Give the facts of four processes on two hosts of four cores each."""
    mine = gather_facts(0, "10.0.0.1")
    mine = replace(mine, cores=(0, 1, 2, 3), num_threads=2, gpus=(), findings=())
    return [
        replace(mine, rank=r, host=host, machine=host, address=f"10.0.0.{r}")
        for r, host in enumerate(("a", "a", "b", "b"))
    ]


def line(findings: list[Finding], severity: Severity) -> str:
    """Give the one finding there is, as text."""
    (finding,) = findings
    assert finding.severity is severity
    return str(finding)


def edge(source: int, target: int, bytes_per_s: float, **other: float) -> Edge:
    whole = {"latency_s": 1e-4, **other}
    return Edge(source, target, bytes_per_s=bytes_per_s, num_bytes=2**22, **whole)


def test_equal_processes_with_a_core_for_each_thread_are_fine(ranks: list[RankFacts]) -> None:
    assert check_together(ranks) == []


def test_another_version_of_safetensors_is_a_warning(ranks: list[RankFacts]) -> None:
    ranks[0] = replace(ranks[0], safetensors="0.0.7")
    assert "safetensors is 0.0.7 on rank 0" in line(check_together(ranks), WARNING)


def test_more_threads_than_cores_are_named_by_host(ranks: list[RankFacts]) -> None:
    ranks[:2] = [replace(facts, num_threads=4) for facts in ranks[:2]]
    text = line(check_together(ranks), WARNING)
    assert "ranks 0, 1 on a run 8 threads on 4 cores" in text and "OMP_NUM_THREADS=2" in text
    pinned = [replace(facts, cores=(facts.rank,), num_threads=1) for facts in ranks]
    assert check_together(pinned) == []
    crowded = [replace(facts, machine="a", num_threads=1, cores=(0, 1)) for facts in ranks]
    assert "Start at most 2 processes" in line(check_together(crowded), WARNING)


def test_facts_arrive_as_they_were_sent(ranks: list[RankFacts]) -> None:
    findings = tuple(check_together([replace(ranks[0], num_threads=9)]))
    sent = replace(ranks[0], findings=findings)
    assert RankFacts.from_dict(json.loads(json.dumps(sent.to_dict()))) == sent


def test_few_ranks_measure_all_pairs_and_many_their_neighbours() -> None:
    assert sorted(pairs(3)) == [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]
    assert len(pairs(8)) == 8 * 7
    many = set(pairs(9))
    assert {(s, s + 1) for s in range(8)} | {(s + 1, s) for s in range(8)} < many
    assert many >= {(8, 0), (0, 8)} and len(many) == 18


def test_slow_uneven_and_far_edges_are_named() -> None:
    fast = [edge(0, 1, 1e9), edge(1, 0, 1e9), edge(1, 2, 1e9)]
    assert list(check_edges(fast)) == []
    text = line(list(check_edges([*fast, edge(2, 1, 1e8)])), WARNING)
    assert "rank 2 ──► 1 carries less than a third of the median edge's 8 Gbit/s" in text
    text = line(list(check_edges([*fast, edge(2, 1, 1e6)])), WARNING)
    assert "(8 Mbit/s)" in text and "1 MiB takes up to 1.05 s" in text
    far = [edge(0, n, 1e9, latency_s=n * 1e-2) for n in range(1, 6)]
    text = line(list(check_edges(far)), WARNING)
    assert "rank 0 ──► 1, 0 ──► 2, 0 ──► 3 and 2 more carry" in text and "50 ms" in text


def test_a_folder_that_cannot_be_written_is_an_error_and_one_to_be_made_is_not(
    tmp_path: Path,
) -> None:
    assert not has_error(check_folder(tmp_path / "runs" / "new", "runs", "Choose another"))
    assert not (tmp_path / "runs").exists()
    text = line(list(check_folder(Path("/proc/1"), "runs", "Choose another")), ERROR)
    assert "the folder for runs, /proc/1: nothing can be written there" in text


def test_little_space_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("penstock.doctor.examine")
    monkeypatch.setattr(module, "LITTLE_BYTES", 2**80)
    assert "are free" in line(list(check_folder(tmp_path, "runs", "Choose another")), WARNING)


def test_the_exit_code_follows_the_findings() -> None:
    error = Finding(severity=ERROR, what="a", why="b", change="c")
    warning = replace(error, severity=WARNING)
    report = Report(rank=0, world_size=2, findings=(warning,))
    assert report.exit_code == 0
    assert replace(report, findings=(error, warning)).exit_code == 1
    assert replace(report, findings=(error,), stopped=True).exit_code == 2
    edges = (edge(0, 1, 2e9), edge(1, 0, 1e9))
    tests = (SelfTest(True, "EQUAL"),)
    data = json.loads(replace(report, edges=edges, self_tests=tests).to_json())
    assert data["slowest"] == [1, 0] and data["findings"][0]["severity"] == "warning"


def test_alone_it_compares_a_tiny_pipeline_with_the_unsplit_model(capsys: Captured) -> None:
    assert run(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "rank  host" in text and "Penstock  safetensors" in text
    assert "training can work" in text
    assert "self-test: cpu: EQUAL: all 16 tensors of K=2, M=4 are the unsplit model's" in text


def test_alone_it_writes_json(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no_such_interface")  # not needed here
    assert run(["doctor", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["exit_code"] == 0 and data["self_tests"][0]["equal"] is True
    assert data["ranks"][0]["memory_bytes"] > 0
    severities = {f["severity"] for f in data["findings"] if "GLOO" in f["what"]}
    assert severities == {"warning"}


def test_a_torch_that_does_not_repeat_itself_ends_with_1(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = iter(range(1000))
    monkeypatch.setattr("torch.nn.Tanh.forward", lambda self, x: x + next(calls))
    assert run(["doctor"]) == 1
    said = capsys.readouterr()
    assert said.err == ""
    assert "error   the self-test: cpu: FAILED: RecomputeError" in said.out
    assert said.out.endswith("training could not work: 1 error\n")


def test_a_step_over_the_mesh_is_judged_by_all_ranks() -> None:
    equal = Outcome(loss=1.5, unsplit_loss=1.5, differing=0)
    test, found = judge([equal, equal])
    assert test.equal and "2 processes" in test.text and found == []
    rounded = replace(equal, unsplit_loss=1.5000001)
    test, found = judge([equal, rounded, replace(equal, differing=1)])
    assert not test.equal and "as ranks 1, 2 would run it" in line(found, WARNING)
    for wrong in (replace(equal, unsplit_loss=1.6), replace(rounded, loss=1.5000001)):
        test, found = judge([equal, wrong])
        assert not test.equal and "is 1.5 (1.5) on rank 0, 1.5" in line(found, ERROR)


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"RANK": "x", "MASTER_PORT": "-1"}, ["RANK=x", "MASTER_PORT=-1"]),
        ({"RANK": "1"}, ["RANK set, but WORLD_SIZE"]),
        (
            {"MASTER_ADDR": "no.such.name.invalid", "MASTER_PORT": "29500"},
            ["MASTER_ADDR=no.such.name.invalid: this name has no address here"],
        ),
        ({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "TAKEN"}, ["MASTER_PORT=", "cannot listen"]),
    ],
)
def test_a_job_that_cannot_meet_ends_with_2_and_a_line_for_each_mistake(
    environment: dict[str, str],
    words: list[str],
    capsys: Captured,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        job = {"RANK": "0", "WORLD_SIZE": "2"} if "MASTER_ADDR" in environment else {}
        for name, value in {**job, **environment}.items():
            port = str(taken.getsockname()[1])
            monkeypatch.setenv(name, port if value == "TAKEN" else value)
        assert run(["doctor", "--timeout", "2"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    lines = said.err.splitlines()
    assert len(lines) == 1 or len(lines) == len(words)
    assert all(line.startswith("penstock: ") for line in lines)
    assert all(word in said.err for word in words)
