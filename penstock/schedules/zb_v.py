"""ZB-V: ZB-H1 on a V, so that the rank that begins a micro-batch ends it: 1F1B's memory, no wait.

Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 6; filled by costs.
"""

from collections import defaultdict
from collections.abc import Iterator
from itertools import count, product

from .costs import Costs
from .family import Family, zigzag
from .ir import Schedule
from .list_scheduling import Policy, Step, best_of


def zb_v(costs: Costs | None = None) -> Family:
    """Run two stages on each of R ranks, there and back: rank r runs stages r and 2 R - 1 - r.

        Pipeline(layers, num_stages=4, schedule=schedules.zb_v())

    `costs` are as in `zb_h1`.  p = 4 stages, v = 2 of them on each of R = 2 ranks, m = 3:

    rank 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3B1 0B0 3F2 3I2 0I1 3W2 0I2 0W1 0W2
    rank 1 | 1F0 2F0 1F1 2F1 2B0 1F2 1I0 1W0 2F2 2I1 1I1 2I2 1I2 2W1 1W1 2W2 1W2

    No rank keeps more than 2 R micro-batches of its two stages, the activation memory of 1F1B's
    first rank.  If forwards and both parts of backwards all take the same time F, a step takes
    6 m + R - 1 times F from m = R on.  None can be shorter: rank R - 1 starts after R - 1, and
    never waits.  From m = 2 R - 1 on no other rank waits between its first instruction and its
    last.  1F1B of two such stages at once takes 6 m + 6 (R - 1).

    If transfers cost nothing, no unequal costs are known for which it is longer than 1F1B of the
    same two stages at once.  If both stages of one rank are slow, 1F1B of neighbouring stages can
    be shorter, since it divides the work otherwise.

    Raises:
        ConfigError: when it is called, if `costs` are those of another number of stages.
    """
    return Family("zb_v", _schedule, 2, (("costs", costs),), zigzag)


def _schedule(num_stages: int, num_microbatches: int, costs: Costs | None) -> Schedule:
    num_ranks = num_stages // 2
    ranks = zigzag(num_stages, num_ranks)
    orders = [_order(rank, num_ranks, num_microbatches) for rank in range(num_ranks)]
    policies = (*(Policy(orders=orders, patience=patience) for patience in (0, 1)), *on_a_v())
    return best_of(policies, ranks, num_microbatches, costs, 2 * num_ranks)


def _order(rank: int, num_ranks: int, num_microbatches: int) -> list[Step]:
    """Return the paper's order of a rank, for 2 R - 1 micro-batches or more; those beyond m are
    struck out.
    """
    # "there" is the stage on the way from rank 0 to the turn, "back" the one on the way back
    more = max(0, num_microbatches - (2 * num_ranks - 1))
    after = num_ranks - rank
    there, back = (False, rank), (False, 2 * num_ranks - 1 - rank)
    from_there, from_back = (True, rank), (True, 2 * num_ranks - 1 - rank)
    kinds = (
        # warm-up
        *[there] * (2 * after - 1),
        *[back, there] * rank,
        *[back, from_back] * after,
        # steady state
        *[there, from_there, back, from_back] * (more + rank),
        # drain
        *[from_there, back, from_back] * (after - 1),
        *[from_there, from_back] * rank,
        *[from_there] * after,
    )
    numbers: defaultdict[tuple[bool, int], Iterator[int]] = defaultdict(count)
    steps = ((*kind, next(numbers[kind])) for kind in kinds)
    return [step for step in steps if step[2] < num_microbatches]


def on_a_v() -> Iterator[Policy]:
    for patience, backwards_first, pace in product((0, 1), (False, True), (2, 3, 6)):

        def priority(
            is_backward: bool, stage: int, i: int, b: bool = backwards_first, pace: int = pace
        ) -> tuple[int, ...]:
            return is_backward != b, i if is_backward else stage + pace * i, -stage

        yield Policy(priority=priority, patience=patience)
