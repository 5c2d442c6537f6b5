"""The same instances solved with toulbar2, an exact solver of cost function networks.

It is given the rows of the limit as they are missed, since all of them have 10^8 entries: solved,
those that its answer exceeds are added, and it is solved again, until none is exceeded.
"""

from collections.abc import Sequence
from importlib.util import find_spec
from multiprocessing import get_context
from multiprocessing.connection import Connection
from time import perf_counter
from typing import Any

import numpy

from benchmarks.iopddl.solver.problem import Numbers, Problem

NAME = "pytoulbar2"
_GRACE_S = 10.0
"""How much longer than its limit the peer may run before it is stopped."""
_PARTS = 16
"""Of the time: of each the row that is exceeded most is added."""


def is_installed() -> bool:
    """Tell whether the peer is there."""
    return find_spec(NAME) is not None


def solve(problem: Problem, seconds: float) -> list[int] | None:
    """Return the last choices that the peer finds in the time, which may exceed the limit; None if
    there are none.  It runs in a process of its own, which is stopped if it does not end.
    """
    spawning, until_s = get_context("spawn"), perf_counter() + seconds + _GRACE_S
    receives, sends = spawning.Pipe(duplex=False)
    process = spawning.Process(target=_run, args=(problem, seconds, sends))
    process.start()
    sends.close()
    found = None
    try:
        while receives.poll(max(0.0, until_s - perf_counter())):
            found = receives.recv()
    except EOFError:  # it has ended
        pass
    finally:
        process.kill()
        process.join()
    return found


def _run(problem: Problem, seconds: float, sends: Connection) -> None:
    until_s, rows = perf_counter() + seconds, set[int]()
    while True:
        network = _network(problem, sorted(rows))
        left_s = int(until_s - perf_counter())
        found = network.Solve(timeLimit=left_s) if left_s > 0 else None
        if found is None:
            return
        choices = [int(x) for x in found[0]]
        sends.send(choices)
        missed = exceeded(problem, choices) - rows
        if not missed:
            return
        rows |= missed


def _network(problem: Problem, rows: Sequence[int]) -> Any:
    """Give the problem to the peer, with the limit at some times; costs are whole numbers."""
    import pytoulbar2

    network = pytoulbar2.CFN()
    for n, costs in enumerate(problem.costs):
        network.AddVariable(f"x{n}", range(len(costs)))
        network.AddFunction([n], costs.tolist())
    for a, b, costs in problem.edges:
        network.AddFunction([a, b], costs.ravel().tolist())
    for time in rows:
        scope = [n for n, (start, end) in enumerate(problem.alive) if start <= time < end]
        words = [f"{-int(problem.limit)}"]  # of its form "sum >= least"
        for n in scope:
            words.append(str(len(problem.usages[n])))
            words += [f"{x} {-int(use)}" for x, use in enumerate(problem.usages[n])]
        network.CFN.wcsp.postKnapsackConstraint(scope, " ".join(words), kp=True)
    return network


def exceeded(problem: Problem, choices: Sequence[int]) -> set[int]:
    """Return times at which choices use more than the limit: in each part of all the worst."""
    used: Numbers = numpy.zeros(1 + max((end for _, end in problem.alive), default=0))
    for usage, (start, end), x in zip(problem.usages, problem.alive, choices, strict=True):
        used[start] += usage[x]
        used[max(start, end)] -= usage[x]
    used = used.cumsum()
    parts = numpy.array_split(numpy.arange(len(used)), _PARTS)
    worst = (int(own[used[own].argmax()]) for own in parts if len(own))
    return {time for time in worst if used[time] > problem.limit}
