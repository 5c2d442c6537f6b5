"""The doctor of a job: what it measures, and that a broken job ends with a reason, not a hang."""

import signal

import pytest

from tests.distributed.launch import run, start

DOCTOR = ["-m", "penstock", "doctor"]
JOB = ["-m", "tests.distributed.doctor_job"]


def test_three_processes_measure_edges_and_train_a_step_together() -> None:
    first, *others = run(3, DOCTOR)
    assert [ended.output for ended in others] == ["", ""]
    for words in ("rank  host", "latency", "0 ──► 2", "self-test: 3 processes: EQUAL: all"):
        assert words in first.output
    assert "training can work" in first.output.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", ("0,1", "0,1,1"))
def test_a_rank_that_nobody_has_is_named_by_rank_0(ranks: str) -> None:
    job = start(len(ranks.split(",")), [*JOB, "as", ranks, "12"], {"WORLD_SIZE": "3"})
    ended = job.wait(60)
    assert [each.code for each in ended] == [2] * len(ended)
    assert "rank 2 did not come. See that all processes run, each with a RANK" in ended[0].output
    assert not any("Traceback" in each.output for each in ended)


@pytest.mark.slow
def test_where_rank_0_does_not_come_the_others_say_that_nobody_is_there() -> None:
    for ended in start(2, [*JOB, "as", "1,2", "2"], {"WORLD_SIZE": "3"}).wait(60):
        assert ended.code == 2
        assert f"rank {ended.rank + 1} of 3 did not find the others at 127.0.0.1:" in ended.output
        assert "Traceback" not in ended.output


@pytest.mark.slow
def test_an_interface_that_is_not_there_stops_each_before_anything_runs() -> None:
    for ended in start(3, DOCTOR, {"GLOO_SOCKET_IFNAME": "nowhere7"}).wait(60):
        assert ended.code == 2
        assert f"rank {ended.rank}: error: GLOO_SOCKET_IFNAME=nowhere7" in ended.output
        assert "Set it to one of lo" in ended.output


def test_processes_of_other_versions_are_named_by_all() -> None:
    for ended in start(2, [*JOB, "version", "1", "30"]).wait(60):
        assert ended.code == 2 and "do not agree on version of Penstock: " in ended.output
        assert "'0.0.1' on rank 1" in ended.output


@pytest.mark.slow
def test_a_process_that_dies_on_the_way_is_named() -> None:
    rank = 1
    ended = start(3, [*JOB, "dies", str(rank), "40"]).wait(90)
    assert ended[rank].code == -signal.SIGKILL
    assert [e.code for e in ended if e.rank != rank] == [1, 1]
    said = ended[0].output
    assert "0 ──► 2" in said and "self-test" not in said
    assert "error: " in said and f"rank {rank} (stage {rank})" in said


@pytest.mark.slow
def test_where_rank_0_dies_the_others_speak_for_themselves() -> None:
    first, *others = start(3, [*JOB, "dies", "0", "40"]).wait(90)
    assert first.code == -signal.SIGKILL
    for ended in others:
        assert ended.code == 1 and f"penstock: rank {ended.rank}: error: " in ended.output
        assert "rank 0 (stage 0)" in ended.output
