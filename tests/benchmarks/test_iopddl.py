"""Beside a peer, instances of the contest are solved and evaluated alike."""

import pytest

from benchmarks.iopddl import peer
from benchmarks.iopddl.main import beside, made, main
from benchmarks.iopddl.solver.problem import Problem, evaluate
from benchmarks.iopddl.solver.search import solve


def test_times_that_exceed_the_limit_are_found_and_no_others() -> None:
    _, problem = made(30)
    hungry = [int(own.argmax()) for own in problem.usages]
    found = peer.exceeded(problem, hungry)
    assert found
    for time in found:
        alive = (n for n, (start, end) in enumerate(problem.alive) if start <= time < end)
        assert sum(problem.usages[n].max() for n in alive) > problem.limit
    assert peer.exceeded(problem, solve(problem, 20.0).choices) == set()


@pytest.mark.parametrize("extra", [0, 1])
def test_an_answer_of_the_peer_counts_only_within_the_limit(monkeypatch, extra) -> None:
    name, problem = made(30)
    own = solve(problem, 20.0)
    peak = evaluate(problem, own.choices).peak
    tight = Problem(
        costs=problem.costs,
        edges=problem.edges,
        usages=problem.usages,
        alive=problem.alive,
        limit=peak - extra,
    )
    monkeypatch.setattr(peer, "solve", lambda problem, seconds: list(own.choices))
    row = {"limit_s": 20.0, "read_s": 0.0, "feasible": "yes", "cost": own.cost}
    found = beside(tight, row)
    assert found["peer_feasible"] == ("no" if extra else "yes"), name
    assert found.get("ours_to_peer") == (None if extra else 1.0)


@pytest.mark.skipif(not peer.is_installed(), reason="pytoulbar2 is not installed")
def test_the_peer_finds_what_is_proven_best() -> None:
    _, problem = made(30)
    choices = peer.solve(problem, 30.0)
    assert choices is not None
    own = solve(problem, 20.0)
    assert own.is_proven
    assert evaluate(problem, choices).cost == own.cost


def test_a_peer_that_is_not_installed_is_left_out_with_a_note(monkeypatch, capsys) -> None:
    monkeypatch.setattr(peer, "is_installed", lambda: False)
    main(["--peer"])
    printed = capsys.readouterr().out
    assert "pytoulbar2 is left out: it is not installed." in printed
    assert "peer: cost" not in printed
