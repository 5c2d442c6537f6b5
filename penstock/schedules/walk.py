"""Walk all programs at once, in an order in which no rank ever has to wait.

The verifier walks to prove that a schedule ends, the simulator to price it, and the loop-back
transport to run it in a single thread.
"""

from collections.abc import Iterator

from penstock.errors import ScheduleError

from .ir import Instruction, Message, Receive, Schedule, Send
from .text import marked_text


def walk(schedule: Schedule) -> Iterator[tuple[int, Instruction]]:
    """Yield every (rank, instruction), each receive after its send, each program in order.

    Sends do not wait for their receivers.  The order is the same on every call.

    Raises:
        ScheduleError: ranks wait for each other for ever, or for a message nobody sends.
    """
    position = [0] * schedule.num_ranks
    sent: set[Message | None] = set()
    waiting: dict[Message, int] = {}
    runnable = list(range(schedule.num_ranks))[::-1]
    while runnable:
        rank = runnable.pop()
        program = schedule.programs[rank]
        for index in range(position[rank], len(program)):
            instruction = program[index]
            awaited = instruction.message if isinstance(instruction, Receive) else None
            if awaited is not None and awaited not in sent:
                waiting[awaited], position[rank] = rank, index
                break
            sent.discard(awaited)
            yield rank, instruction
            if not isinstance(instruction, Send):
                continue
            message = instruction.message
            sent.add(message)
            if message in waiting:
                runnable.append(waiting.pop(message))
        else:
            position[rank] = len(program)
    _raise_if_stuck(schedule, position)


def _raise_if_stuck(schedule: Schedule, position: list[int]) -> None:
    stuck = [r for r, program in enumerate(schedule.programs) if position[r] < len(program)]
    if not stuck:
        return
    reasons = ", ".join(f"rank {r} waits at {schedule.programs[r][position[r]]}" for r in stuck)
    raise ScheduleError(
        f"the schedule cannot end: {reasons}, and nobody left can send what they wait for.\n"
        + marked_text(schedule, {r: position[r] for r in stuck})
    )
