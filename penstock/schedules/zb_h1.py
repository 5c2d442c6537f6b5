"""ZB-H1: the weight part of a backward waits until its rank is idle, in 1F1B's memory.

Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 2.1; filled by costs as in section 3.
"""

from collections.abc import Iterator
from itertools import product

from .costs import Costs
from .family import Family
from .ir import Schedule
from .list_scheduling import Policy, best_of, order_of
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
    return Family("zb_h1", _schedule, arguments=(("costs", costs),))


def _schedule(num_stages: int, num_microbatches: int, costs: Costs | None) -> Schedule:
    policies = zero_bubble(num_stages, num_microbatches)
    return best_of(policies, range(num_stages), num_microbatches, costs, num_stages)


def zero_bubble(num_stages: int, num_microbatches: int) -> Iterator[Policy]:
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
