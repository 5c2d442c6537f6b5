"""Lower bounds: seconds that no schedule of given stages takes less than.

a rank   forwards of the stages before ──► M x what others wait for ──► their backwards
                                           M x all its work, which ends whenever it may
"""

from collections.abc import Sequence
from math import inf
from typing import NamedTuple


class Load(NamedTuple):
    """The work of a stage for a micro-batch, in seconds.

    `awaited_s` is the part of `busy_s` that other stages wait for, and `back_s` the part of a
    backward that the stage before waits for.  `handover_s` goes to the next stage and back.  The
    stage keeps at most `in_flight` micro-batches.
    """

    rank: int
    forward_s: float
    back_s: float
    awaited_s: float
    busy_s: float
    handover_s: float = 0.0
    in_flight: float = inf


def even_step_s(total_s: float, longest_s: float, num_ranks: int, num_microbatches: int) -> float:
    """Return the seconds of a step whose work is shared evenly, but for the longest part."""
    return num_microbatches * max(longest_s, total_s / num_ranks)


def rank_ends_s(loads: Sequence[Load], num_microbatches: int) -> dict[int, float]:
    """Return for each rank the seconds that it cannot end before: its first stage waits for its
    input, and what others wait for goes on through the stages before that one.
    """
    before: dict[int, tuple[float, float]] = {}
    work: dict[int, tuple[float, float]] = {}
    there_s = back_s = 0.0
    for load in loads:
        before.setdefault(load.rank, (there_s, back_s))
        awaited_s, busy_s = work.get(load.rank, (0.0, 0.0))
        work[load.rank] = awaited_s + load.awaited_s, busy_s + load.busy_s
        there_s += load.forward_s + load.handover_s / 2
        back_s += load.back_s + load.handover_s / 2
    return {
        rank: start_s
        + max(num_microbatches * work[rank][0] + rest_s, num_microbatches * work[rank][1])
        for rank, (start_s, rest_s) in before.items()
    }


def least_step_s(loads: Sequence[Load], num_microbatches: int) -> float:
    """Return seconds that a step of these stages takes at least."""
    least_s, round_trip_s = max(rank_ends_s(loads, num_microbatches).values()), 0.0
    for load in reversed(loads):  # with k in flight, M micro-batches need M / k round trips
        round_trip_s += load.forward_s + load.back_s + load.handover_s
        least_s = max(least_s, num_microbatches * round_trip_s / load.in_flight)
    return least_s
