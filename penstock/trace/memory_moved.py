"""Move the memory of one step to the times of another step that ran the same instructions."""

from bisect import bisect_right
from collections import defaultdict
from dataclasses import replace

from .timeline import Span, Timeline


def memory_moved(traced: Timeline, timed: Timeline) -> Timeline | None:
    """Return `timed` with the memory samples of `traced`, each at the same place of its rank.

    A sample inside an instruction, or between two, keeps its share of that time.

    traced   |  F0  | F1 |...| B0  |        a sample at 1/2 of F1
    timed    | F0 | F1|......|B0|           is also at 1/2 of F1

    Returns:
        None if the ranks of both steps did not run the same instructions in the same order.
    """
    if traced.schedule != timed.schedule:
        return None
    rank_of = {span.instruction.stage: span.rank for span in traced.spans}
    old_s, new_s = _marks(traced), _marks(timed)

    def moved_s(rank: int, time_s: float) -> float:
        old, new = old_s[rank], new_s[rank]
        n = bisect_right(old, time_s)
        if n == 0:
            return timed.start_s
        if n == len(old):
            return min(new[-1] + time_s - old[-1], timed.end_s)
        share = (time_s - old[n - 1]) / (old[n] - old[n - 1])
        return new[n - 1] + share * (new[n] - new[n - 1])

    memory = (
        replace(sample, time_s=moved_s(rank_of[sample.stage], sample.time_s))
        for sample in traced.memory
        if sample.stage in rank_of
    )
    return replace(timed, memory=tuple(memory))


def _marks(timeline: Timeline) -> dict[int, list[float]]:
    spans: dict[int, list[Span]] = defaultdict(list)
    for span in timeline.spans:
        spans[span.rank].append(span)
    return {
        rank: [time_s for span in of_rank for time_s in (span.start_s, span.end_s)]
        for rank, of_rank in spans.items()
    }
