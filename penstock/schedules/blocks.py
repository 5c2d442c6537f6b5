"""A building block repeated: one micro-batch's way through a V, again after every six slots."""

from collections.abc import Callable, Iterator

from .costs import UNIT_COSTS, Costs
from .family import zigzag
from .greedy import Policy, Step, best_of
from .ir import Schedule
from .zb_v import on_a_v

At = Callable[[int], int]
"""The slot, counted from the start of the block, in which a stage runs."""


def repeated(
    num_stages: int,
    num_microbatches: int,
    costs: Costs | None,
    *,
    forward_at: At,
    backward_at: At,
    most_live: int,
) -> Schedule:
    """Keep the order that the repeated block has on each rank, and fill its gaps.

    A slot is the time of one forward or half a backward.  A rank spends six on a micro-batch, and
    where the block leaves none free, two of them are those of weights.  Ranks run ahead of the
    slots as early as operands and `most_live` allow.  Where filling a V without an order makes a
    shorter step of it, that is taken.
    """
    num_ranks = num_stages // 2
    ranks = zigzag(num_stages, num_ranks)

    def order(rank: int) -> list[Step]:
        slots: dict[Step, int] = {}
        for stage in (rank, num_stages - 1 - rank):
            for i in range(num_microbatches):
                slots[False, stage, i] = forward_at(stage) + 6 * i
                slots[True, stage, i] = backward_at(stage) + 6 * i
        return sorted(slots, key=slots.__getitem__)

    def policies() -> Iterator[Policy]:
        orders = [order(rank) for rank in range(num_ranks)]
        for patient in (False, True):
            yield Policy(live=[most_live] * num_ranks, orders=orders, patient=patient)
        yield from on_a_v(num_ranks, most_live)

    return best_of(policies(), ranks, num_microbatches, costs or UNIT_COSTS)
