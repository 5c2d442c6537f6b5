"""List scheduling by critical paths, for given costs, on any ranks, under a limit of memory."""

from collections import Counter
from collections.abc import Iterator
from itertools import accumulate, product

from penstock.errors import ConfigError

from .costs import UNIT_COSTS, Costs
from .family import Family, OnRanks, in_turn
from .ir import Schedule
from .laws import SYNCHRONOUS, AtMostBytes, Law
from .list_scheduling import Policy, built
from .memory import Sizes
from .problem import (
    FORWARD,
    Answer,
    Problem,
    check_limits,
    joined,
    length,
    lower_bound,
    problem_of,
    schedule_of,
)

_PACES = (8, 2, 1, 0.5)
"""How far apart micro-batches are due, in what the busiest rank takes for one: first those that
keep least.
"""
_ROUNDING = 1e-9
"""Steps that differ by less are as long."""


def critical_path(
    costs: Costs | None = None,
    ranks: tuple[int, ...] | None = None,
    memory: AtMostBytes | None = None,
) -> Family:
    """Let a free rank begin, of what is ready, that with the longest way to the end of the step.

        Pipeline(layers, num_stages=3, schedule=schedules.critical_path(costs))
        schedules.critical_path(costs, ranks=(0, 1, 2, 1, 0))  # two stages on ranks 0 and 1

    `costs` are as in `zb_h1`, and messages count.  `ranks` are those of the stages, each of any
    number of them; without it each stage has a rank of its own.  p = 3, m = 4:

    rank 0 | 0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3
    rank 1 | 1F0 1F1 1F2 1I0 1W0 1B1 1F3 1I2 1W2 1I3 1W3
    rank 2 | 2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3

    Each forward or backward has a due time: the latest start of the longest way from it to the
    end of its micro-batch.  Micro-batches end one period after each other.  The period is the
    busiest rank's time for one micro-batch.  The first due begins.  A rank thus has one
    micro-batch in flight for each period of its way there and back.  Weight parts of backwards
    fill the gaps.  It tries periods of several lengths, and backwards in one part or two, and
    takes the shortest step.

    No rank keeps more than `memory` says, which is proved before a step.  Without it, a rank
    keeps R, 2 R or all micro-batches of each of its stages on R ranks: the fewest that make the
    step shortest.

    Making it raises ConfigError where costs are of another number of stages, limits of another
    number of ranks, or a limit is too low for even one micro-batch.

    Raises:
        ConfigError: `ranks` leave out a rank, or `memory` is no limit.
    """
    _check_arguments(ranks, memory)
    laws: tuple[Law, ...] = SYNCHRONOUS if memory is None else (*SYNCHRONOUS, memory)
    arguments = (("costs", costs), ("ranks", ranks), ("memory", memory))
    deal = in_turn if ranks is None else OnRanks("critical_path", ranks)
    return Family("critical_path", _schedule, 1, arguments, deal, laws)


def _check_arguments(ranks: object, memory: object) -> None:
    given = ranks if isinstance(ranks, tuple) else ()
    is_whole = given and all(type(rank) is int for rank in given)
    if ranks is not None and not (is_whole and {*given} == {*range(1 + max(given))}):
        raise ConfigError(
            f"ranks={ranks!r}: give the rank of each stage as a tuple, each rank from 0 up at "
            "least once, such as (0, 1, 1, 0), or None for a rank for each"
        )
    if not isinstance(memory, AtMostBytes | None):
        raise ConfigError(
            f"memory={memory!r} is no limit of bytes: write AtMostBytes(Sizes(kept_bytes=...), "
            "limit_bytes=...), or None for no limit; with kept_bytes=1 it counts micro-batches"
        )


def _schedule(
    num_stages: int,
    num_microbatches: int,
    costs: Costs | None,
    ranks: tuple[int, ...] | None,
    memory: AtMostBytes | None,
) -> Schedule:
    on = ranks or tuple(range(num_stages))
    best: tuple[tuple[float, float], Answer, Problem] | None = None
    for limit in _limits(on, num_microbatches) if memory is None else (memory,):
        problem = problem_of(costs or UNIT_COSTS, limit, on, num_microbatches, ())
        check_limits(problem)
        goal = lower_bound(problem) * (1 + _ROUNDING)
        for made in filled(problem):
            took = length(problem, made)
            if best is None or took[0] < best[0][0] * (1 - _ROUNDING):
                best = took, made, problem
            if took[0] <= goal:
                return schedule_of(problem, made)
    assert best is not None, "some policy is tried"
    return schedule_of(best[2], best[1])


def filled(problem: Problem) -> Iterator[Answer]:
    """Yield what ranks do that begin first what is due first, in each of the ways to fill."""
    for policy in _policies(problem):
        answer = built(problem, policy)
        assert answer is not None, "no order is given that ranks could wait in"
        yield joined(problem, answer)


def _limits(ranks: tuple[int, ...], num_microbatches: int) -> Iterator[AtMostBytes]:
    """Yield limits from low to none: micro-batches that a rank keeps of each of its stages."""
    counted = Counter(ranks)
    depths = (min(depth, num_microbatches) for depth in (len(counted), 2 * len(counted)))
    for depth in dict.fromkeys((*depths, num_microbatches)):
        yield AtMostBytes(
            Sizes(kept_bytes=1), tuple(depth * counted[rank] for rank in sorted(counted))
        )


def _policies(problem: Problem) -> Iterator[Policy]:
    """Yield the ways to fill that are tried."""
    p, stages = problem, range(problem.num_stages)
    forward, of_inputs, of_weights, one = p.times()
    give = list(map(min, of_inputs, one))
    lag = [p.lag[p.op(FORWARD, s, 0)] for s in stages]
    # what is still to do of a micro-batch from the beginning of a step on, as seconds
    back = list(accumulate(a + b for a, b in zip(give, lag, strict=True)))
    there = [*accumulate(reversed([a + b for a, b in zip(forward, [*lag[1:], 0], strict=True)]))]
    to_go = [[back[-1] + t for t in reversed(there)], back]
    period = max(
        sum(forward[s] + min(of_inputs[s] + of_weights[s], one[s]) for s in own)
        for own in p.stages
    )
    cheaper = frozenset(s for s in stages if of_inputs[s] + of_weights[s] > one[s])
    undivided = dict.fromkeys((cheaper, frozenset[int](), frozenset(stages)))
    for whole, pace, patience in product(undivided, _PACES, (0, 1)):

        def due(
            is_backward: bool, stage: int, i: int, apart: float = pace * period
        ) -> tuple[float]:
            return (apart * i - to_go[is_backward][stage],)

        if len(whole) < len(stages) or patience == 0:
            yield Policy(priority=due, patience=patience, whole=whole)
