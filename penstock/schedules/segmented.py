"""Segmented: each stage of a schedule is cut into several in a row on its rank."""

from collections.abc import Iterator
from itertools import accumulate, chain, pairwise, repeat

from penstock.errors import ConfigError

from .family import Family, OnRanks
from .ir import Backward, BackwardInput, BackwardWeight, Forward, Instruction, Schedule
from .laws import SYNCHRONOUS
from .one_f_one_b import one_f_one_b


def segmented(sizes: tuple[int, ...], base: Family = one_f_one_b) -> Family:
    """Run the schedule of `base` with its stages cut into segments, as many as `sizes` says.

        schedules.segmented((2, 2))                        # 1F1B on 2 ranks, 4 stages
        schedules.segmented((3, 1, 2), schedules.gpipe)    # GPipe on 3 ranks, 6 stages

    A segment is a stage like any other.  A forward of a stage runs its segments in order,
    and a backward runs them in reverse.

    sizes = (2, 2), m = 3:

    rank 0 | 0F0 1F0 0F1 1F1 1B0 0B0 0F2 1F2 1B1 0B1 1B2 0B2
    rank 1 | 2F0 3F0 3B0 2B0 2F1 3F1 3B1 2B1 2F2 3F2 3B2 2B2

    The step is as long as that of `base`.  Its purpose is recompute: each segment recomputes
    right before its own backward.  A rank then holds the graph of one segment at a time, and for
    each micro-batch in flight only the inputs of its segments.

    Making it raises ConfigError for another number of stages than there are segments.

    Raises:
        ConfigError: `sizes` are not whole numbers of at least 1, or `base` is no synchronous
            family, or has a limit of memory of its own.
    """
    # 1. Check the sizes and the base.
    if not (isinstance(sizes, tuple) and sizes and all(type(n) is int and n > 0 for n in sizes)):
        raise ConfigError(
            f"sizes={sizes!r}: give the number of segments of each stage as a tuple of whole "
            "numbers of at least 1, such as (2, 2)"
        )
    if not isinstance(base, Family) or base.laws != SYNCHRONOUS:
        raise ConfigError(
            f"base={base!r:.80}: only stages of a synchronous family without a limit of memory "
            "are cut into segments; give one, such as one_f_one_b or zb_h1()"
        )
    # 2. All segments of a stage are on its rank.
    ranks = chain(*map(repeat, base.ranks(len(sizes)), sizes))
    deal = OnRanks("segmented", tuple(ranks))
    return Family("segmented", _schedule, arguments=(("sizes", sizes), ("base", base)), deal=deal)


def _schedule(
    num_stages: int, num_microbatches: int, sizes: tuple[int, ...], base: Family
) -> Schedule:
    segments = [range(*ends) for ends in pairwise(accumulate(sizes, initial=0))]

    def cut(x: Instruction) -> Iterator[Instruction]:
        match x:
            case Forward(stage, i):
                yield from (Forward(segment, i) for segment in segments[stage])
            case Backward(stage, i) | BackwardInput(stage, i) | BackwardWeight(stage, i):
                yield from (type(x)(segment, i) for segment in reversed(segments[stage]))

    programs = base(len(sizes), num_microbatches).programs
    return Schedule.of(chain.from_iterable(map(cut, program)) for program in programs)
