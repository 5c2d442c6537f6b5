"""Calls run in processes of their own, with the results that they have here."""

import math
import operator
import os
import signal
from collections.abc import Iterator

import pytest

from penstock.planner import solvers
from penstock.planner.solvers import Solvers


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[Solvers]:
    """Run every call but the first elsewhere, in one process."""
    monkeypatch.setattr(solvers, "_FEW", 1)
    monkeypatch.setattr(solvers, "_MOST", 1)
    with Solvers() as own:
        yield own


def test_the_first_calls_run_here_and_all_others_in_one_process_a_thread(pool: Solvers) -> None:
    places = [pool.submit(os.getpid).result() for _ in range(4)]
    assert places[0] == os.getpid()
    assert len({*places}) == 2 and places[1] == places[2] == places[3]


def test_what_calls_return_and_raise_is_what_they_do_here(pool: Solvers) -> None:
    assert [pool.submit(math.factorial, n).result() for n in range(5)] == [1, 1, 2, 6, 24]
    with pytest.raises(ZeroDivisionError, match="by zero"):
        pool.submit(operator.floordiv, 1, 0).result()
    assert pool.submit(math.factorial, 5).result() == 120


def test_a_call_whose_process_is_killed_runs_here(pool: Solvers) -> None:
    other = [pool.submit(os.getpid).result() for _ in range(2)][-1]
    os.kill(other, signal.SIGKILL)
    assert pool.submit(math.factorial, 5).result() == 120
    assert pool.submit(os.getpid).result() not in (other, os.getpid())


def test_no_process_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solvers, "_FEW", 0)
    with pytest.raises(RuntimeError, match="of the search"), Solvers() as pool:
        others = {pool.submit(os.getpid).result() for _ in range(4)}
        raise RuntimeError("of the search")
    assert others
    for other in others:
        with pytest.raises(ProcessLookupError):
            os.kill(other, 0)


def test_a_result_is_told_from_what_a_call_prints(
    pool: Solvers, capfd: pytest.CaptureFixture[str]
) -> None:
    assert pool.submit(print, "first").result() is None
    assert pool.submit(print, "to nowhere").result() is None
    assert pool.submit(math.factorial, 3).result() == 6
    assert capfd.readouterr().out == "first\n"
