"""What the doctor concludes from what it found; that it stops where going on would hang."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.cli.main import run
from penstock.doctor import Report
from penstock.doctor.examine import judge
from penstock.doctor.facts import RankFacts, gather_facts
from penstock.doctor.findings import (
    Edge,
    Finding,
    check_edges,
    check_network,
    check_together,
    pairs,
)
from penstock.equality import CheckReport
from penstock.equality.report import CheckRow

Captured = pytest.CaptureFixture[str]
NAMES = {"here": ("10.0.0.1",), "there": ("10.0.0.2",), "looped": ("127.0.1.1",)}
GOOD = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "there"}


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def ranks() -> list[RankFacts]:
    """Give the facts of four processes on two hosts of four cores each."""
    mine = replace(gather_facts(0), cores=(0, 1, 2, 3), num_threads=2, gpus=())
    return [
        replace(mine, rank=r, host=host, machine=host)
        for r, host in enumerate(("a", "a", "b", "b"))
    ]


def together(ranks: list[RankFacts], quota: float = 64.0) -> list[Finding]:
    return list(check_together(ranks, quota, Path("/nowhere")))


def network(environment: dict[str, str], host: str = "here") -> list[Finding]:
    return list(check_network(environment, host, lambda name: NAMES.get(name, ())))


def line(findings: list[Finding], *, is_error: bool) -> str:
    """Give the one finding there is, as text."""
    (finding,) = findings
    assert finding.is_error is is_error
    return finding.text


def test_equal_processes_with_a_core_for_each_thread_are_fine(ranks: list[RankFacts]) -> None:
    assert together(ranks) == []


def test_more_threads_than_cores_are_named_by_host(ranks: list[RankFacts]) -> None:
    many = [replace(facts, num_threads=4) for facts in ranks[:2]]
    text = line(together([*many, *ranks[2:]]), is_error=False)
    assert "ranks 0, 1 on a run 8 threads on 4 cores" in text and "OMP_NUM_THREADS=2" in text
    pinned = [replace(facts, cores=(facts.rank,), num_threads=1) for facts in ranks]
    assert together(pinned) == []
    crowded = [replace(facts, machine="a", num_threads=1, cores=(0, 1)) for facts in ranks]
    assert "Start at most 2 processes" in line(together(crowded), is_error=False)


def test_a_quota_below_the_visible_cores_is_what_counts(ranks: list[RankFacts]) -> None:
    text = line(together(ranks, 2.5), is_error=False)
    assert "ranks 0, 1 on a run 4 threads on 2.5 cores" in text and "OMP_NUM_THREADS=1" in text


@pytest.mark.skipif("CUDA_VISIBLE_DEVICES" in os.environ, reason="GPUs are hidden")
def test_gpus_that_torch_does_not_see_are_a_warning(ranks, tmp_path) -> None:
    text = line(list(check_together(ranks, 64.0, tmp_path)), is_error=False)
    assert "has NVIDIA GPUs that torch" in text


def test_a_network_that_leads_to_the_other_hosts_is_fine() -> None:
    assert network({}) == network(GOOD) == []
    assert network({**GOOD, "LOCAL_WORLD_SIZE": "4"}, "looped") == []


def test_addresses_that_other_hosts_cannot_reach_are_errors() -> None:
    text = line(network({**GOOD, "MASTER_ADDR": "looped"}), is_error=True)
    assert "MASTER_ADDR=looped: each host would look for rank 0 on itself" in text
    text = line(network(GOOD, "looped"), is_error=True)
    assert "gloo on looped would listen at 127.0.1.1" in text and "GLOO_SOCKET_IFNAME" in text
    text = line(network({**GOOD, "GLOO_SOCKET_IFNAME": "nowhere7"}), is_error=True)
    assert "no network interface 'nowhere7'" in text


def test_neighbours_and_both_ends_are_measured_both_ways() -> None:
    assert pairs(2) == [(0, 1), (1, 0)]
    many = set(pairs(9))
    assert {(s, s + 1) for s in range(8)} | {(s + 1, s) for s in range(8)} < many
    assert many >= {(8, 0), (0, 8)} and len(many) == 18


def test_the_slowest_edge_is_named_if_it_is_slow() -> None:
    fast = [Edge(0, 1, 1e-4, 1e9), Edge(1, 0, 1e-4, 1e9), Edge(1, 2, 1e-4, 1e9)]
    assert list(check_edges(fast)) == []
    text = line(list(check_edges([*fast, Edge(2, 1, 1e-4, 1e8)])), is_error=False)
    assert "rank 2 ──► 1 carries 800 Mbit/s, the median edge 8 Gbit/s" in text
    text = line(list(check_edges([Edge(2, 1, 1e-4, 1e6)])), is_error=False)
    assert "1 MiB takes 1.05 s" in text


def test_the_exit_code_follows_the_findings() -> None:
    error, warning = Finding(True, "a"), Finding(False, "b")
    assert Report(findings=[warning]).exit_code == 0
    assert Report(findings=[warning, error]).exit_code == 1
    assert Report(findings=[error], stopped=True).exit_code == 2


def test_alone_it_compares_a_tiny_pipeline_with_the_unsplit_model(capsys: Captured) -> None:
    assert run(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "rank  host" in text and "training can work" in text
    assert "self-test: cpu: EQUAL: all 16 tensors of K=2, M=4 are the unsplit model's" in text
    assert run(["doctor", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["verdict"] == "training can work" and told["rank"] == 0
    assert "self-test: cpu: EQUAL" in "\n".join(told["report"])


def test_a_torch_that_does_not_repeat_itself_ends_with_1(capsys, monkeypatch) -> None:
    calls = iter(range(1000))
    monkeypatch.setattr("torch.nn.Tanh.forward", lambda self, x: x + next(calls))
    assert run(["doctor"]) == 1
    said = capsys.readouterr()
    assert said.err == ""
    assert "error: the self-test: cpu: FAILED: RecomputeError" in said.out
    assert said.out.endswith("training could not work\n")


def test_a_rank_that_would_train_alone_is_an_error(capsys, monkeypatch) -> None:
    monkeypatch.setenv("RANK", "1")
    assert run(["doctor"]) == 1
    assert "RANK is set, but WORLD_SIZE is not" in capsys.readouterr().out


def test_a_step_over_the_mesh_is_judged_by_all_ranks() -> None:
    def found(differing: int, by: float, *, is_job: bool = True) -> list[Finding]:
        rows = (CheckRow("loss", "loss", 1, differing, by, 1.5),)
        report = CheckReport(rows, "the forward of layer 0", (), "K=2, M=4")
        return judge("3 processes", report, is_job=is_job)[1]

    assert found(0, 0.0) == []
    assert "round differently" in line(found(1, 1e-7), is_error=False)
    assert "'loss' by 1e-07" in line(found(1, 1e-7, is_job=False), is_error=True)
    assert "'loss' by 0.1" in line(found(1, 0.1), is_error=True)


@pytest.mark.parametrize(
    ("environment", "word"),
    [
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR"),
    ],
)
def test_a_job_that_cannot_meet_ends_with_2_and_a_line(
    environment: dict[str, str], word: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert run(["doctor", "--timeout", "2"]) == 2
    said = capsys.readouterr()
    (text,) = said.err.splitlines()
    assert said.out == "" and text.startswith("penstock: rank 0: error: ") and word in text
