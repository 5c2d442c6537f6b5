"""ZB-H1: the weight part of a backward waits until its rank is idle, in 1F1B's memory.

ZB-H2: ZB-H1 with more forwards in the warm-up, so that no rank waits after its first one.

ZB-V: ZB-H1 on a V, so that the rank that begins a micro-batch ends it: 1F1B's memory, no wait.

Qi et al. 2023, "Zero Bubble Pipeline Parallelism", sections 2.1 (ZB-H1), 2.2 (ZB-H2) and 6 (ZB-V);
filled by costs as in section 3.
"""

from collections import defaultdict
from collections.abc import Iterator
from itertools import count, product

from .costs import Costs
from .family import Family, zigzag
from .ir import Schedule
from .list_scheduling import Policy, Step, best_of, order_of
from .one_f_one_b import one_f_one_b


def zb_h1(costs: Costs | None = None) -> Family:
    """Run backwards of inputs early, and backwards of weights when a rank would wait.

        Pipeline(layers, num_stages=4, schedule=schedules.zb_h1())
        Pipeline(layers, num_stages=4, schedule=schedules.zb_h1(costs))

    It is filled for `costs`; without these, for stages alike whose forward and both parts of whose
    backward take the same time F.  No stage keeps more than p micro-batches, what 1F1B's first one
    keeps.  p = 3, m = 4:

    rank 0 | 0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3
    rank 1 | 1F0 1F1 1F2 1I0 1W0 1B1 1F3 1I2 1W2 1I3 1W3
    rank 2 | 2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3

    From m = p on a step takes 3 m + p - 1 times F; 1F1B takes 3 m + 3 (p - 1).  The bubble is a
    third of 1F1B's, and the last stage, which starts after p - 1, never waits.  With fewer
    micro-batches a step takes 2 m + 2 p - 1.  It is never longer than 1F1B's, for any costs.

    Raises:
        ConfigError: when it is called, if `costs` are those of another number of stages.
    """
    return Family("zb_h1", _zb_h1, arguments=(("costs", costs),))


def _zb_h1(num_stages: int, num_microbatches: int, costs: Costs | None) -> Schedule:
    policies = _policies(num_stages, num_microbatches)
    return best_of(policies, range(num_stages), num_microbatches, costs, num_stages)


def _policies(num_stages: int, num_microbatches: int) -> Iterator[Policy]:
    """Yield policies, 1F1B among them."""
    to_go = [num_stages - stage for stage in range(num_stages)]
    for patience, backwards_first in product((0, 1), (False, True)):
        for ahead in (to_go, [2 * stages - 1 for stages in to_go]):
            yield Policy(
                ahead=ahead,
                priority=lambda is_backward, *_, b=backwards_first: (is_backward != b,),
                patience=patience,
            )
    order = order_of(one_f_one_b(num_stages, num_microbatches))
    for whole in ((), range(num_stages)):
        yield Policy(orders=order, whole=frozenset(whole))


def zb_h2(costs: Costs | None = None) -> Family:
    """Fill the time until the first gradient with forwards too: up to 2 p - 1 live micro-batches.

        Pipeline(layers, num_stages=4, schedule=schedules.zb_h2())

    `costs` are as in `zb_h1`, and for none of them is a step longer than that of `zb_h1`.
    p = 3, m = 5:

    rank 0 | 0F0 0F1 0F2 0F3 0F4 0B0 0B1 0B2 0B3 0B4
    rank 1 | 1F0 1F1 1F2 1I0 1F3 1I1 1F4 1I2 1W0 1I3 1W1 1I4 1W2 1W3 1W4
    rank 2 | 2F0 2I0 2F1 2I1 2F2 2I2 2F3 2I3 2F4 2I4 2W0 2W1 2W2 2W3 2W4

    If forwards and both parts of backwards all take the same time, no rank waits between its first
    instruction and its last from m = 2 p - 1 on.  The step is then no shorter than that of
    `zb_h1`: stage s begins s forwards late in both.  A rank ends earlier and can use the
    time for its optimizer's step, or for the next step's forwards, if ranks need not wait for all.

    Raises:
        ConfigError: when it is called, if `costs` are those of another number of stages.
    """
    return Family("zb_h2", _zb_h2, arguments=(("costs", costs),))


def _zb_h2(num_stages: int, num_microbatches: int, costs: Costs | None) -> Schedule:
    policies, p = _policies(num_stages, num_microbatches), num_stages
    return best_of(policies, range(p), num_microbatches, costs, 2 * p - 1, p)


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
    return Family("zb_v", _zb_v, 2, (("costs", costs),), zigzag)


def _zb_v(num_stages: int, num_microbatches: int, costs: Costs | None) -> Schedule:
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
