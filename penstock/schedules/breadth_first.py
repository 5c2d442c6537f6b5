"""Breadth-first: v stages on each rank, all micro-batches through one after the other.

Lamy-Poirier 2022, "Breadth-First Pipeline Parallelism", section 4; also known as looped BFS.
"""

from penstock.errors import check_count

from .family import Family
from .ir import Backward, Forward, Schedule


def breadth_first(stages_per_rank: int = 2) -> Family:
    """Run GPipe on R ranks again and again; rank r runs stages r, r + R, and so on.

        Pipeline(layers, num_stages=4, schedule=schedules.breadth_first(stages_per_rank=2))

    Calling it makes the schedule.  p = 4 stages, v = 2 of them on each of R = 2 ranks, m = 3:

    rank 0 | 0F0 0F1 0F2 2F0 2F1 2F2 2B0 2B1 2B2 0B0 0B1 0B2
    rank 1 | 1F0 1F1 1F2 3F0 3F1 3F2 3B0 3B1 3B2 1B0 1B1 1B2

    Each stage runs all its forwards in a row, and all its backwards.  A step needs its weights
    twice, and its gradients are ready early, which helps if collectives gather and reduce them.
    A rank keeps all m micro-batches on each of its stages, as in GPipe.

    From m = R on the bubble is (R - 1) / (v m) of the work, as that of `interleaved_1f1b`, which
    is the depth-first form.  With fewer micro-batches a rank waits after every stage: the step
    takes (v - 1) max(m, R) + m + R - 1 forwards and backwards.

    Raises:
        ConfigError: `stages_per_rank` is no whole number of at least 1.
    """
    check_count("stages_per_rank", stages_per_rank)
    arguments = (("stages_per_rank", stages_per_rank),)
    return Family("breadth_first", _schedule, stages_per_rank, arguments)


def _schedule(num_stages: int, num_microbatches: int, stages_per_rank: int) -> Schedule:
    num_ranks = num_stages // stages_per_rank
    return Schedule.of(
        (
            *(Forward(s, i) for s in stages for i in range(num_microbatches)),
            *(Backward(s, i) for s in reversed(stages) for i in range(num_microbatches)),
        )
        for stages in (range(rank, num_stages, num_ranks) for rank in range(num_ranks))
    )
