"""A building block repeated: one micro-batch's way through a V, again after every six slots."""

from .costs import Costs
from .family import zigzag
from .ir import Schedule
from .list_scheduling import Policy, Step, best_of
from .zb_v import on_a_v


def repeated(
    num_stages: int,
    num_microbatches: int,
    costs: Costs | None,
    *,
    pace: int,
    pause: int,
    live: int,
) -> Schedule:
    """Keep the order that the repeated block has on each rank, and fill its gaps.

    A slot is the time of one forward or half a backward.  A micro-batch goes on by a stage every
    `pace` slots on its way from the first rank to the last, and from the last stage back to the
    last rank; every slot on the rest of its way; and pauses so many slots before it turns back.

    A rank spends six on a micro-batch, and where the block leaves none free, two of them are those
    of weights.  Ranks run ahead of the slots as early as operands and `live` micro-batches allow.
    Where filling a V without an order makes a shorter step of it, that is taken.
    """
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
