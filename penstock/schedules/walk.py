"""Walk all programs at once, in an order in which no rank ever has to wait.

The verifier walks to prove that a schedule ends, the simulator to price it, and the loop-back
transport to run it in a single thread.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import repeat

from penstock.errors import ScheduleError

from .ir import Instruction, Message, Receive, Schedule, Send
from .text import marked_text

Run = tuple[int, int, int]
"""(rank, start, stop): the rank runs program[start:stop] without a wait."""
_SENT = -1


def walk(schedule: Schedule) -> Iterator[tuple[int, Instruction]]:
    """Yield every (rank, instruction), each receive after its send, each program in order; a
    ScheduleError if ranks wait for each other for ever, or for a message nobody sends.

    Sends do not wait for their receivers.  The order is the same on every call.
    """
    for rank, start, stop in walk_runs(schedule):
        yield from zip(repeat(rank), schedule.programs[rank][start:stop])


def walk_runs(schedule: Schedule) -> Iterator[Run]:
    """Yield the same as `walk` in runs: each ends before its rank would have to wait."""
    rest = [enumerate(program) for program in schedule.programs]
    position = [0] * schedule.num_ranks
    halfway: dict[Message, int] = {}
    runnable = list(range(schedule.num_ranks))[::-1]
    while runnable:
        rank = runnable.pop()
        start = position[rank]
        position[rank] = _run(rank, rest[rank], halfway, runnable, len(schedule.programs[rank]))
        yield rank, start, position[rank]
    stuck = [r for r, program in enumerate(schedule.programs) if position[r] < len(program)]
    if stuck:
        reasons = (f"rank {r} waits at {schedule.programs[r][position[r]]}" for r in stuck)
        raise ScheduleError(
            f"the schedule cannot end: {', '.join(reasons)}, and nobody left can send what they "
            f"wait for.\n{marked_text(schedule, {r: position[r] for r in stuck})}"
        )


def _run(
    rank: int,
    rest: Iterator[tuple[int, Instruction]],
    halfway: dict[Message, int],
    runnable: list[int],
    end: int,
) -> int:
    """Run a rank until it must wait; return the position of its receive, or `end`.

    `halfway` maps a message that is sent and not yet received to _SENT, and one that a rank waits
    for to that rank.  A send adds the rank that waits for its message to `runnable`.
    """
    for position, x in rest:
        if isinstance(x, Send):
            waits = halfway.pop(x.message, _SENT)
            if waits == _SENT:
                halfway[x.message] = _SENT
            else:
                runnable.append(waits)
        elif isinstance(x, Receive) and halfway.pop(x.message, None) != _SENT:
            halfway[x.message] = rank
            return position
    return end


@contextmanager
def collection_paused() -> Iterator[None]:
    """Stop the collector for a block whose values hold no cycles: it would find nothing.

    It would visit every value again and again, for a third of the time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
