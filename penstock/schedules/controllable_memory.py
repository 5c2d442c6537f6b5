"""V-Half: a V whose forwards go down at half the speed, for half of 1F1B's activation memory.

V-Min: a V that gradients go through as soon as they can, for a third of 1F1B's memory.

Qi et al. 2024, "Pipeline Parallelism with Controllable Memory", section 3.
"""

from .costs import Costs
from .family import Family, zigzag
from .ir import Schedule
from .list_scheduling import Policy, Step, best_of
from .zero_bubble import on_a_v


def v_half(costs: Costs | None = None) -> Family:
    """Run two stages on each of R ranks, there and back, and keep half of what `zb_v` keeps.

        Pipeline(layers, num_stages=4, schedule=schedules.v_half())

    `costs` are as in `zb_h1`.  p = 6 stages, v = 2 of them on each of R = 3 ranks, m = 3:

    rank 0 | 0F0 0F1 5F0 5I0 0F2 5W0 5F1 5B1 0B0 5F2 5I2 0I1 5W2 0W1 0B2
    rank 1 | 1F0 4F0 1F1 4I0 4F1 4W0 1F2 1I0 4I1 1W0 4F2 4W1 1I1 4I2 1W1 4W2 1I2 1W2
    rank 2 | 2F0 3F0 2F1 3F1 3I0 2I0 3W0 2F2 2W0 3F2 3I1 2I1 3W1 2W1 3I2 2I2 3W2 2W2

    No rank keeps more than R + 2 micro-batches of its two stages (R + 1 where R is odd), of the
    2 R that 1F1B keeps as two stages at once.  If forwards and both parts of backwards all take
    the same time F, a step takes at most 6 m + 3 R - 3 times F from m = R on.  That
    1F1B takes 6 m + 6 (R - 1).  If these times are far apart, a step may take longer than
    1F1B's: the schedule keeps to the memory first.

    Raises:
        ConfigError: when it is called, if `costs` are those of another number of stages.
    """
    return Family("v_half", _v_half, 2, (("costs", costs),), zigzag)


def _v_half(num_stages: int, num_microbatches: int, costs: Costs | None) -> Schedule:
    num_ranks = num_stages // 2
    pause = 0 if num_ranks % 2 else 3  # or two steps of a rank would meet in one slot
    live = 2 * (num_ranks // 2 + 1)
    return _repeated(num_stages, num_microbatches, costs, pace=2, pause=pause, live=live)


def _repeated(
    num_stages: int,
    num_microbatches: int,
    costs: Costs | None,
    *,
    pace: int,
    pause: int,
    live: int,
) -> Schedule:
    """Repeat a building block, one micro-batch's path through a V, every six slots.

    A slot is the time of one forward or half a backward.  A rank spends six on a micro-batch: if
    the block leaves none free, two of them are those of weights.  The schedule keeps the block's
    order on each rank and fills its gaps.  Ranks run ahead of the slots as early as operands and
    `live` micro-batches allow.  If filling a V without an order makes a shorter step, it takes
    that instead.
    """
    # slots between the begins of a micro-batch on two stages in a row, for 3 ranks:
    #
    #   stage     0 --> 1 --> 2 --> 3 --> 4 --> 5
    #   forward    pace  pace   1     1     1        then `pause` more slots, and back:
    #   backward    1     1   pace  pace  pace
    num_ranks = num_stages // 2
    down = [pace * s for s in range(num_ranks)]
    up = [down[-1] + s for s in range(1, num_ranks + 1)]
    turn = up[-1] + pause + 1
    down_again = [turn + pace * s for s in range(num_ranks + 1)]
    up_again = [down_again[-1] + s for s in range(1, num_ranks)]
    begins = {False: [*down, *up], True: [*down_again, *up_again][::-1]}

    def order(rank: int) -> list[Step]:
        stages, microbatches = (rank, num_stages - 1 - rank), range(num_microbatches)
        steps = [(b, s, i) for s in stages for i in microbatches for b in (False, True)]
        return sorted(steps, key=lambda step: begins[step[0]][step[1]] + 6 * step[2])

    orders = [order(rank) for rank in range(num_ranks)]
    policies = (*(Policy(orders=orders, patience=patience) for patience in (0, 1)), *on_a_v())
    return best_of(policies, zigzag(num_stages, num_ranks), num_microbatches, costs, live)


def v_min(costs: Costs | None = None) -> Family:
    """Run two stages on each of R ranks, there and back, and keep a third of what `zb_v` keeps.

        Pipeline(layers, num_stages=4, schedule=schedules.v_min())

    `costs` are as in `zb_h1`.  p = 6 stages, v = 2 of them on each of R = 3 ranks, m = 3:

    rank 0 | 0F0 0F1 0F2 5F0 5I0 5W0 5F1 0I0 5I1 0W0 5W1 5F2 5I2 0I1 5W2 0W1 0B2
    rank 1 | 1F0 1F1 1F2 4F0 4I0 4W0 4F1 1I0 1W0 4I1 4F2 4W1 1I1 4I2 1W1 4W2 1I2 1W2
    rank 2 | 2F0 3F0 2F1 3F1 3I0 2I0 3W0 2W0 2F2 3F2 3I1 2I1 3W1 2W1 3I2 2I2 3W2 2W2

    No rank keeps more than 2 (R + 4) / 3 micro-batches of its two stages, of the 2 R that 1F1B
    keeps as two stages at once; for R = 2 that is no less.  If forwards and both parts of
    backwards all take the same time F, a step takes at most 6 m + 4 R - 3 times F from m = R on.
    That 1F1B takes 6 m + 6 (R - 1).  If these times are far apart, a step may take longer than
    1F1B's: the schedule keeps to the memory first.

    Raises:
        ConfigError: when it is called, if `costs` are those of another number of stages.
    """
    return Family("v_min", _v_min, 2, (("costs", costs),), zigzag)


def _v_min(num_stages: int, num_microbatches: int, costs: Costs | None) -> Schedule:
    num_ranks = num_stages // 2
    pause = 0 if num_ranks % 3 else 2  # or two steps of a rank would meet in one slot
    live = 2 * ((num_ranks + 1) // 3 + 1)
    return _repeated(num_stages, num_microbatches, costs, pace=1, pause=pause, live=live)
