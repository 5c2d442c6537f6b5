"""Interleaved 1F1B: v stages on each rank, for a bubble v times smaller.  Narayanan et al. 2021,
"Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", section 2.2.

Breadth-first: v stages on each rank, all micro-batches through one after the other.  Lamy-Poirier
2022, "Breadth-First Pipeline Parallelism", section 4; also known as looped BFS.

Wave: v stages on each rank, dealt out there and back, with whole backwards.  Liu et al. 2023,
"Hanayo: Harnessing Wave-like Pipeline Parallelism", section 3.
"""

from collections.abc import Callable, Iterator
from itertools import product

from penstock.errors import check_count

from .family import Deal, Family, in_turn, zigzag
from .ir import Backward, Forward, Instruction, Schedule
from .list_scheduling import Policy, best_of


def _family(
    name: str, build: Callable[..., Schedule], stages_per_rank: int, deal: Deal = in_turn
) -> Family:
    check_count("stages_per_rank", stages_per_rank)
    return Family(name, build, stages_per_rank, (("stages_per_rank", stages_per_rank),), deal)


def interleaved_1f1b(stages_per_rank: int = 2) -> Family:
    """Alternate one forward with one backward on R ranks; rank r runs stages r, r + R, and so on.

        Pipeline(layers, num_stages=4, schedule=schedules.interleaved_1f1b(stages_per_rank=2))

    Calling it makes the schedule.  p = 4 stages, v = 2 of them on each of R = 2 ranks, m = 4:

    rank 0 | 0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3
    rank 1 | 1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3

    A rank takes R micro-batches through one of its stages, then the same ones through the next.
    It starts with 2 (R - r - 1) + (v - 1) R forwards.  The bubble is (R - 1) / (v m) of the
    work: 1F1B's divided by v.  For that a micro-batch crosses about v times as many borders, and
    the first rank keeps 1 + (R - 1) / (v R) times what 1F1B's keeps.

    It is the depth-first form of `breadth_first`, which keeps all m micro-batches.

    Any m works.  If R does not divide m, the schedule is that of the next multiple of R without
    the micro-batches beyond m.  No rank gets an additional wait.

    Raises:
        ConfigError: `stages_per_rank` is no whole number of at least 1.
    """
    return _family("interleaved_1f1b", _interleaved, stages_per_rank)


def _interleaved(num_stages: int, num_microbatches: int, stages_per_rank: int) -> Schedule:
    num_ranks = num_stages // stages_per_rank
    return Schedule.of(
        _program(rank, num_ranks, num_microbatches, stages_per_rank) for rank in range(num_ranks)
    )


def _program(
    rank: int, num_ranks: int, num_microbatches: int, stages_per_rank: int
) -> Iterator[Instruction]:
    # 1. the order of each direction: R micro-batches through a stage, then through the next
    whole = -(-num_microbatches // num_ranks) * num_ranks
    forwards = [
        Forward(rank + n * num_ranks, first + i)
        for first in range(0, whole, num_ranks)
        for n in range(stages_per_rank)
        for i in range(num_ranks)
    ]
    backwards = [
        Backward(rank + n * num_ranks, first + i)
        for first in range(0, whole, num_ranks)
        for n in reversed(range(stages_per_rank))
        for i in range(num_ranks)
    ]
    # 2. warm-up, one forward for each backward, drain
    warmup = 2 * (num_ranks - rank - 1) + (stages_per_rank - 1) * num_ranks
    warmup = min(warmup, len(forwards))
    steady = zip(forwards[warmup:], backwards, strict=False)
    order = [
        *forwards[:warmup],
        *(instruction for pair in steady for instruction in pair),
        *backwards[len(forwards) - warmup :],
    ]
    # 3. strike out the micro-batches that only fill up the last R
    return (x for x in order if x.microbatch < num_microbatches)


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
    return _family("breadth_first", _breadth_first, stages_per_rank)


def _breadth_first(num_stages: int, num_microbatches: int, stages_per_rank: int) -> Schedule:
    num_ranks = num_stages // stages_per_rank
    return Schedule.of(
        (
            *(Forward(s, i) for s in stages for i in range(num_microbatches)),
            *(Backward(s, i) for s in reversed(stages) for i in range(num_microbatches)),
        )
        for stages in (range(rank, num_stages, num_ranks) for rank in range(num_ranks))
    )


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
    return _family("wave", _wave, stages_per_rank, zigzag)


def _wave(num_stages: int, num_microbatches: int, stages_per_rank: int) -> Schedule:
    num_ranks = num_stages // stages_per_rank
    ranks = zigzag(num_stages, num_ranks)
    most_live = (stages_per_rank + 1) * num_ranks
    return best_of(_wave_policies(num_stages), ranks, num_microbatches, None, most_live)


def _wave_policies(num_stages: int) -> Iterator[Policy]:
    """Yield orders of forwards: late stages first, or waves of micro-batches at some pace."""
    for apart, pace in product((False, True), (0, 2, 3, 4)):

        def priority(
            is_backward: bool, stage: int, i: int, apart: bool = apart, pace: int = pace
        ) -> tuple[int, ...]:
            forward = stage + pace * i if pace else -stage
            at = 2 * i - stage if is_backward else forward
            return apart and is_backward, at, -stage, i

        yield Policy(priority=priority, whole=frozenset(range(num_stages)))
