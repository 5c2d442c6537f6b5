"""Wave: v stages on each rank, dealt out there and back, with whole backwards.

Liu et al. 2023, "Hanayo: Harnessing Wave-like Pipeline Parallelism", section 3.
"""

from collections.abc import Iterator
from itertools import product

from penstock.errors import check_count

from .family import Family, zigzag
from .ir import Schedule
from .list_scheduling import Policy, best_of


def wave(stages_per_rank: int = 2) -> Family:
    """Run stages r, 2 R - 1 - r, 2 R + r, ... on rank r of R; at a turn a rank runs two in a row.

        Pipeline(layers, num_stages=4, schedule=schedules.wave(stages_per_rank=2))

    Calling it makes the schedule.  p = 4 stages, v = 2 of them on each of R = 2 ranks, m = 3:

    rank 0 | 0F0 0F1 0F2 3F0 3B0 3F1 3B1 3F2 3B2 0B0 0B1 0B2
    rank 1 | 1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 2B1 1B1 2B2 1B2

    A rank keeps up to (v + 1) R micro-batches of its v stages.  From m = 2 R on the bubble is
    (R - 1) / (v m) of the work, as in `interleaved_1f1b`.  With v of 3 and more a step takes
    up to a tenth longer for some sizes.  It is never longer than 1F1B's.
    The turns need no transfer: each micro-batch has v - 1 transfers fewer, both ways.

    Raises:
        ConfigError: `stages_per_rank` is no whole number of at least 1.
    """
    check_count("stages_per_rank", stages_per_rank)
    arguments = (("stages_per_rank", stages_per_rank),)
    return Family("wave", _schedule, stages_per_rank, arguments, zigzag)


def _schedule(num_stages: int, num_microbatches: int, stages_per_rank: int) -> Schedule:
    num_ranks = num_stages // stages_per_rank
    ranks = zigzag(num_stages, num_ranks)
    most_live = (stages_per_rank + 1) * num_ranks
    return best_of(_policies(num_stages), ranks, num_microbatches, None, most_live)


def _policies(num_stages: int) -> Iterator[Policy]:
    """Yield orders of forwards: late stages first, or waves of micro-batches at some pace."""
    for apart, pace in product((False, True), (0, 2, 3, 4)):

        def priority(
            is_backward: bool, stage: int, i: int, apart: bool = apart, pace: int = pace
        ) -> tuple[int, ...]:
            forward = stage + pace * i if pace else -stage
            at = 2 * i - stage if is_backward else forward
            return apart and is_backward, at, -stage, i

        yield Policy(priority=priority, whole=frozenset(range(num_stages)))
