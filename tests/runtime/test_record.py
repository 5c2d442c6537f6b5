"""Times of several clocks side by side."""

from dataclasses import replace

from penstock.runtime.record import ProcessRecord, clock_name, put_together
from penstock.trace.timeline import MemorySample

HERE = ProcessRecord("here", 100.0, {0: [101.0, 102.0]}, {0: []}, [MemorySample(0, 102.0, 8)])
SAME_HOST = ProcessRecord(
    "here", 100.5, {1: [101.5, 103.0]}, {1: []}, [MemorySample(1, 103.0, 16)]
)
ELSEWHERE = ProcessRecord("elsewhere", 7.0, {2: [9.0, 10.0]}, {2: []}, [MemorySample(2, 10.0, 32)])


def test_one_clock_is_left_as_it_is() -> None:
    found = put_together([HERE, SAME_HOST], HERE)
    assert found.times_s == {0: [101.0, 102.0], 1: [101.5, 103.0]}
    assert found.memory == [MemorySample(0, 102.0, 8), MemorySample(1, 103.0, 16)]


def test_another_clock_is_set_by_the_moment_at_which_all_agreed() -> None:
    found = put_together([HERE, SAME_HOST, ELSEWHERE], HERE)
    assert found.times_s == {0: [101.0, 102.0], 1: [101.5, 103.0], 2: [102.0, 103.0]}
    assert found.memory[-1] == MemorySample(2, 103.0, 32)
    assert put_together([HERE, ELSEWHERE], ELSEWHERE).times_s == {0: [8.0, 9.0], 2: [9.0, 10.0]}


def test_a_clock_that_has_no_name_is_nobody_elses() -> None:
    mine = replace(HERE, clock=None)
    found = put_together([mine, replace(ELSEWHERE, clock=None)], mine)
    assert found.times_s == {0: [101.0, 102.0], 2: [102.0, 103.0]}


def test_a_clock_keeps_its_name() -> None:
    assert clock_name() == clock_name()
