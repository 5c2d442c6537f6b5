"""ZB-V: ZB-H1 on a V, so that the rank that begins a micro-batch ends it: 1F1B's memory, no wait.

Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 6; filled by costs.
"""

from collections.abc import Iterator
from itertools import product

from .costs import UNIT_COSTS, Costs
from .family import Family, zigzag
from .greedy import Policy, best_of
from .ir import Schedule


def zb_v(costs: Costs | None = None) -> Family:
    """Run two stages on each of R ranks, there and back: rank r runs stages r and 2 R - 1 - r.

        Pipeline(layers, num_stages=4, schedule=schedules.zb_v())

    `costs` are as in `zb_h1`.  p = 4 stages, v = 2 of them on each of R = 2 ranks, m = 3:

    rank 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 0I0 3I1 0W0 3W1 3F2 3I2 0I1 3W2 0I2 0W1 0W2
    rank 1 | 1F0 2F0 1F1 2F1 2I0 1I0 2W0 1W0 1F2 2F2 2I1 1I1 2I2 1I2 2W1 1W1 2W2 1W2

    No rank keeps more than 2 R micro-batches of its two stages: as many layers' as 1F1B's first
    rank keeps.  If forwards and both parts of backwards all take the same time F, a step takes
    6 m + R - 1 times F from m = R on, and none can be shorter: rank R - 1 starts after R - 1, and
    is never idle.  On up to four ranks no other is either, from m = 2 R - 1 on; beyond, where the
    paper's has no gap, a rank may wait a little that it has left at its end.  1F1B of two such
    stages at once takes 6 m + 6 (R - 1).

    Raises:
        ConfigError: when it is called, if `costs` are those of another number of stages.
    """
    return Family("zb_v", _schedule, 2, (("costs", costs),), zigzag)


def _schedule(num_stages: int, num_microbatches: int, costs: Costs | None) -> Schedule:
    num_ranks = num_stages // 2
    ranks = zigzag(num_stages, num_ranks)
    policies = on_a_v(num_ranks, most_live=2 * num_ranks)
    return best_of(policies, ranks, num_microbatches, costs or UNIT_COSTS)


def on_a_v(num_ranks: int, most_live: int) -> Iterator[Policy]:
    """Yield ways to fill a V that keep at most `most_live` micro-batches of a rank's stages."""
    for patient, backwards_first, pace in product((False, True), (False, True), (2, 3, 6)):

        def priority(
            is_backward: bool, stage: int, i: int, b: bool = backwards_first, pace: int = pace
        ) -> tuple[int, ...]:
            return is_backward != b, i if is_backward else stage + pace * i, -stage

        yield Policy(live=[most_live] * num_ranks, priority=priority, patient=patient)
