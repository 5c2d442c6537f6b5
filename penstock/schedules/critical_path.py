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
    check_is_limit,
    check_limits,
    joined,
    length,
    lower_bound,
    problem_of,
    schedule_of,
)

_PACES = (8, 2, 1, 0.5)
"""Time between the dues of two micro-batches, in periods: first those that keep least."""
_ROUNDING = 1e-9
"""Steps that differ by a smaller share are as long."""


def critical_path(
    costs: Costs | None = None,
    ranks: tuple[int, ...] | None = None,
    memory: AtMostBytes | None = None,
) -> Family:
    """Let a free rank begin the ready step with the longest path to the end of its micro-batch.

        Pipeline(layers, num_stages=3, schedule=schedules.critical_path(costs))
        schedules.critical_path(costs, ranks=(0, 1, 2, 1, 0))  # two stages on ranks 0 and 1

    `costs` are as in `zb_h1`, and messages count.  `ranks` are those of the stages, each of any
    number of them; without it each stage has a rank of its own.  p = 3, m = 4:

    rank 0 | 0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3
    rank 1 | 1F0 1F1 1F2 1I0 1W0 1B1 1F3 1I2 1W2 1I3 1W3
    rank 2 | 2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3

    Each forward or backward has a due time: the latest start of the longest way from it to the
    end of its micro-batch.  Micro-batches end one period after each other.  The period is the
    busiest rank's time for one micro-batch.  A free rank begins the ready work that is due first.
    It thus has one micro-batch in flight for each period of its way there and back.  Weight parts
    of backwards fill the gaps.  The family tries periods of several lengths, and backwards in one
    part or two, and takes the shortest step.

    No rank keeps more than `memory` says, which is proved before a step.  Without it, a rank
    keeps R, 2 R or all micro-batches of each of its stages on R ranks: the fewest that make the
    step shortest.

    Making it raises ConfigError if costs are of another number of stages, limits of another
    number of ranks, or a limit is too low for even one micro-batch.

    Raises:
        ConfigError: `ranks` leave out a rank, or `memory` is no limit.
    """
    # 1. Check that each rank from 0 up has a stage, and that the memory is a limit.
    numbers = ranks if isinstance(ranks, tuple) else ()
    is_whole = numbers and all(type(rank) is int for rank in numbers)
    if ranks is not None and not (is_whole and {*numbers} == {*range(1 + max(numbers))}):
        raise ConfigError(
            f"ranks={ranks!r}: give the rank of each stage as a tuple, each rank from 0 up at "
            "least once, such as (0, 1, 1, 0), or None for a rank for each"
        )
    check_is_limit(memory)
    # 2. A limit becomes a law, which is proved of each schedule.
    laws: tuple[Law, ...] = SYNCHRONOUS if memory is None else (*SYNCHRONOUS, memory)
    arguments = (("costs", costs), ("ranks", ranks), ("memory", memory))
    deal = in_turn if ranks is None else OnRanks("critical_path", ranks)
    return Family("critical_path", _schedule, 1, arguments, deal, laws)


def _schedule(
    num_stages: int,
    num_microbatches: int,
    costs: Costs | None,
    ranks: tuple[int, ...] | None,
    memory: AtMostBytes | None,
) -> Schedule:
    of_stages = ranks or tuple(range(num_stages))
    limits = [memory]
    if memory is None:
        # limits from low to none: micro-batches in flight on each stage of a rank
        counted = Counter(of_stages)
        depths = [min(n * len(counted), num_microbatches) for n in (1, 2)]
        limits = [
            AtMostBytes(
                Sizes(kept_bytes=1), tuple(depth * counted[rank] for rank in sorted(counted))
            )
            for depth in dict.fromkeys((*depths, num_microbatches))
        ]
    best: tuple[float, Answer, Problem] | None = None
    for limit in limits:
        problem = problem_of(costs or UNIT_COSTS, limit, of_stages, num_microbatches, ())
        check_limits(problem)
        goal = lower_bound(problem) * (1 + _ROUNDING)
        for answer in filled(problem):
            end = length(problem, answer)[0]
            if best is None or end < best[0] * (1 - _ROUNDING):
                best = end, answer, problem
            if end <= goal:  # none can be shorter
                return schedule_of(problem, answer)
    assert best is not None, "some policy is tried"
    return schedule_of(best[2], best[1])


def filled(problem: Problem) -> Iterator[Answer]:
    """Yield an answer for each policy by due times."""
    for policy in _policies(problem):
        answer = built(problem, policy)
        assert answer is not None, "no order is given that ranks could wait in"
        yield joined(problem, answer)


def _policies(problem: Problem) -> Iterator[Policy]:
    """Yield policies by due times: every pace, patience, and set of undivided backwards."""
    p, stages = problem, range(problem.num_stages)
    forward, of_inputs, of_weights, one = p.by_kind(p.time)
    give = list(map(min, of_inputs, one))
    lag = p.by_kind(p.lag)[FORWARD]
    # seconds that a micro-batch still needs from the begin of a step on: back, and there and back
    back = list(accumulate(a + b for a, b in zip(give, lag, strict=True)))
    there = [*accumulate(reversed([a + b for a, b in zip(forward, [*lag[1:], 0], strict=True)]))]
    to_go = [[back[-1] + t for t in reversed(there)], back]
    period = max(
        sum(forward[s] + min(of_inputs[s] + of_weights[s], one[s]) for s in stages_of_rank)
        for stages_of_rank in p.stages
    )
    cheaper = frozenset(s for s in stages if of_inputs[s] + of_weights[s] > one[s])
    # stages with whole backwards: those where the parts cost more, none, or all
    undivided = dict.fromkeys((cheaper, frozenset[int](), frozenset(stages)))
    for whole, pace, patience in product(undivided, _PACES, (0, 1)):

        def due(
            is_backward: bool, stage: int, i: int, apart: float = pace * period
        ) -> tuple[float]:
            return (apart * i - to_go[is_backward][stage],)

        if len(whole) < len(stages) or patience == 0:
            yield Policy(priority=due, patience=patience, whole=whole)
