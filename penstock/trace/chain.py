"""The longest chain of work that a timeline's order and messages allow."""

from collections.abc import Sequence

from penstock.schedules.ir import (
    Compute,
    Instruction,
    Message,
    Schedule,
    UpdateWeights,
    awaited_message,
    sent_message,
)
from penstock.schedules.walk import walk

from .timeline import Timeline


def works_s(timeline: Timeline) -> tuple[float, ...]:
    """Return, for each span, the seconds in which layers ran or the optimizer: 0 of all others."""
    return tuple(
        span.duration_s if isinstance(span.instruction, Compute | UpdateWeights) else 0
        for span in timeline.spans
    )


def longest_chain_s(timeline: Timeline, durations_s: Sequence[float]) -> float:
    """Compute the seconds that the programs take if each span takes what `durations_s` says.

    Each instruction begins as soon as the one before it on its rank and the message that it takes
    in allow; messages take no time.  A receive whose send the timeline lacks waits for nothing.
    """
    num_ranks = timeline.num_ranks
    programs: list[list[Instruction]] = [[] for _ in range(num_ranks)]
    of_ranks: list[list[float]] = [[] for _ in range(num_ranks)]
    sent = {None, *(sent_message(span.instruction) for span in timeline.spans)}
    for span, duration_s in zip(timeline.spans, durations_s, strict=True):
        if awaited_message(span.instruction) in sent:
            programs[span.rank].append(span.instruction)
            of_ranks[span.rank].append(duration_s)
    next_s = [iter(of_rank) for of_rank in of_ranks]
    arrival_s: dict[Message, float] = {}
    free_s: list[float] = [0] * num_ranks
    for rank, instruction in walk(Schedule(tuple(map(tuple, programs)))):
        awaited = awaited_message(instruction)
        if awaited is not None:
            free_s[rank] = max(free_s[rank], arrival_s.pop(awaited))
        free_s[rank] += next(next_s[rank])
        message = sent_message(instruction)
        if message is not None:
            arrival_s[message] = free_s[rank]
    return max(free_s, default=0)
