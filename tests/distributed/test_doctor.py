"""The doctor of a job: what it measures, and that a broken job ends with a reason, not a hang."""

import json
import signal
from typing import Any

import pytest

from tests.distributed.launch import Ended, run, start

DOCTOR = ["-m", "penstock", "doctor"]
JOB = ["-m", "tests.distributed.doctor_job"]


def report(ended: Ended) -> dict[str, Any]:
    """Read the JSON among what rank 0 wrote."""
    (line,) = (line for line in ended.output.splitlines() if line.startswith("{"))
    return json.loads(line)


def test_three_processes_measure_every_edge_and_train_a_step_together() -> None:
    first, *others = run(3, [*DOCTOR, "--json"])
    assert [ended.output for ended in others] == ["", ""]
    found = report(first)
    assert [facts["rank"] for facts in found["ranks"]] == [0, 1, 2]
    assert found["ranks"][1]["torch"]
    edges = {(edge["source"], edge["target"]): edge for edge in found["edges"]}
    assert edges.keys() == {(a, b) for a in range(3) for b in range(3) if a != b}
    assert all(e["latency_s"] > 0 and e["bytes_per_s"] > 0 for e in edges.values())
    least = min(edges, key=lambda ends: edges[ends]["bytes_per_s"])
    assert tuple(found["slowest"]) == least
    (test,) = found["self_tests"]
    assert test["equal"] and "3 processes" in test["text"]
    assert not [f for f in found["findings"] if f["severity"] == "error"]


@pytest.mark.slow
def test_the_report_is_tables_and_lines_of_rank_0() -> None:
    first, second = run(2, [*DOCTOR])
    assert second.output == ""
    for words in ("rank  host", "built for", "latency ──►", "slowest edge: rank "):
        assert words in first.output
    assert "self-test: EQUAL: 2 processes" in first.output
    assert "training can work" in first.output.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", ("0,1", "0,1,1"))
def test_a_rank_that_nobody_has_is_named_by_rank_0(ranks: str) -> None:
    job = start(len(ranks.split(",")), [*JOB, "as", ranks, "12"], {"WORLD_SIZE": "3"})
    ended = job.wait(60)
    assert [each.code for each in ended] == [2] * len(ended)
    assert "rank 2 did not come. See that all processes run, each with a RANK" in ended[0].output
    assert not any("Traceback" in each.output for each in ended)


def test_where_rank_0_does_not_come_the_others_say_that_nobody_is_there() -> None:
    for ended in start(2, [*JOB, "as", "1,2", "2"], {"WORLD_SIZE": "3"}).wait(60):
        assert ended.code == 2
        assert f"rank {ended.rank + 1} of 3 did not find the others at 127.0.0.1:" in ended.output
        assert "Traceback" not in ended.output


def test_an_interface_that_is_not_there_stops_each_before_anything_runs() -> None:
    for ended in start(3, DOCTOR, {"GLOO_SOCKET_IFNAME": "nowhere7"}).wait(60):
        assert ended.code == 2
        assert f"rank {ended.rank}: error: GLOO_SOCKET_IFNAME=nowhere7" in ended.output
        assert "one of " in ended.output and "lo (127.0.0.1)" in ended.output
        assert "edges" not in ended.output


def test_processes_of_other_versions_are_named_by_all() -> None:
    for ended in start(2, [*JOB, "version", "1", "30"]).wait(60):
        assert ended.code == 2
        assert "do not agree on version of Penstock: " in ended.output
        assert "'0.0.1' on rank 1" in ended.output


@pytest.mark.slow
def test_a_process_that_dies_on_the_way_is_named() -> None:
    rank = 1
    ended = start(3, [*JOB, "dies", str(rank), "40"]).wait(90)
    assert ended[rank].code == -signal.SIGKILL
    assert [e.code for e in ended if e.rank != rank] == [1, 1]
    found = report(ended[0])
    assert len(found["edges"]) == 6 and found["self_tests"] == []
    (error,) = (f for f in found["findings"] if f["severity"] == "error")
    assert f"rank {rank} (stage {rank})" in error["why"]


@pytest.mark.slow
def test_where_rank_0_dies_the_others_speak_for_themselves() -> None:
    first, *others = start(3, [*JOB, "dies", "0", "40"]).wait(90)
    assert first.code == -signal.SIGKILL
    for ended in others:
        assert ended.code == 1
        assert f"penstock: rank {ended.rank}: error: the job broke off" in ended.output
        assert "rank 0 (stage 0)" in ended.output
