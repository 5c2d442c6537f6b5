"""ZB-H2: ZB-H1 with more forwards in the warm-up, so that no rank waits after its first one.

Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 2.2; filled by costs as in section 3.
"""

from .costs import Costs
from .family import Family
from .ir import Schedule
from .list_scheduling import best_of
from .zb_h1 import zero_bubble


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
    return Family("zb_h2", _schedule, arguments=(("costs", costs),))


def _schedule(num_stages: int, num_microbatches: int, costs: Costs | None) -> Schedule:
    policies, p = zero_bubble(num_stages, num_microbatches), num_stages
    return best_of(policies, range(p), num_microbatches, costs, 2 * p - 1, p)
