"""A schedule as text, both ways: one line a rank, one word an instruction.

    word      instruction                    word      instruction
    0F3       Forward(0, 3)                  0F3>1     SendActivation(0, 3, peer=1)
    0f3       Forward(0, 3), inputs kept     1F3<0     ReceiveActivation(1, 3, peer=0)
    0R3       Recompute(0, 3)                1B3>0     SendGradient(1, 3, peer=0)
    0B3       Backward(0, 3)                 0B3<1     ReceiveGradient(0, 3, peer=1)
    0U        CommitStatistics(0)            1F3?0     PostReceive(1, 3, peer=0, gradient=False)
    0G        ReduceGradients(0)             0B3?1     PostReceive(0, 3, peer=1, gradient=True)

The first number is the stage that acts, the number after the letter the micro-batch.
"""

import re
from collections.abc import Callable
from functools import partial
from typing import assert_never

from penstock.errors import ScheduleError

from .ir import (
    Backward,
    CommitStatistics,
    Forward,
    Instruction,
    PostReceive,
    ReceiveActivation,
    ReceiveGradient,
    Recompute,
    ReduceGradients,
    Schedule,
    SendActivation,
    SendGradient,
)

_WORD = re.compile(
    r"(?P<stage>\d+)(?:(?P<once>[UG])|"
    r"(?P<op>[FfRB])(?P<microbatch>\d+)(?:(?P<arrow>[<>?])(?P<peer>\d+))?)"
)


def instruction_to_text(instruction: Instruction) -> str:  # noqa: C901, PLR0912 - one flat match
    """Write one instruction as one word."""
    match instruction:
        case Forward(s, i, keep_graph):
            return f"{s}{'F' if keep_graph else 'f'}{i}"
        case Recompute(s, i):
            return f"{s}R{i}"
        case Backward(s, i):
            return f"{s}B{i}"
        case SendActivation(s, i, peer):
            return f"{s}F{i}>{peer}"
        case ReceiveActivation(s, i, peer):
            return f"{s}F{i}<{peer}"
        case SendGradient(s, i, peer):
            return f"{s}B{i}>{peer}"
        case ReceiveGradient(s, i, peer):
            return f"{s}B{i}<{peer}"
        case CommitStatistics(s):
            return f"{s}U"
        case PostReceive(s, i, peer, gradient):
            return f"{s}{'B' if gradient else 'F'}{i}?{peer}"
        case ReduceGradients(s):
            return f"{s}G"
        case _:
            assert_never(instruction)


_PEER_INSTRUCTIONS: dict[str, Callable[[int, int, int], Instruction]] = {
    "F>": SendActivation,
    "F<": ReceiveActivation,
    "B>": SendGradient,
    "B<": ReceiveGradient,
    "F?": partial(PostReceive, gradient=False),
    "B?": partial(PostReceive, gradient=True),
}


def parse_instruction(word: str) -> Instruction:
    """Read one word.

    Raises:
        ScheduleError: the word is not an instruction.
    """
    found = _WORD.fullmatch(word)
    if found is None:
        raise ScheduleError(
            f"{word!r} is not an instruction; expected a word such as 0F3, 0R3, 0B3, 0F3>1 or 0U"
        )
    stage, op = int(found["stage"]), found["op"]
    if op is None:
        return CommitStatistics(stage) if found["once"] == "U" else ReduceGradients(stage)
    microbatch = int(found["microbatch"])
    if found["arrow"]:
        kind = _PEER_INSTRUCTIONS.get(op + found["arrow"])
        if kind is None:
            raise ScheduleError(
                f"{word!r}: only F and B have a peer (activations and gradients), not {op!r}"
            )
        return kind(stage, microbatch, int(found["peer"]))
    match op:
        case "R":
            return Recompute(stage, microbatch)
        case "B":
            return Backward(stage, microbatch)
        case _:
            return Forward(stage, microbatch, keep_graph=op == "F")


def to_text(schedule: Schedule) -> str:
    """Write a schedule: one line a rank, words set in columns."""
    rows = [
        [instruction_to_text(instruction) for instruction in program]
        for program in schedule.programs
    ]
    width = max((len(word) for row in rows for word in row), default=0)
    return "\n".join(
        f"rank {rank} | " + " ".join(word.ljust(width) for word in row).rstrip()
        for rank, row in enumerate(rows)
    )


def parse(text: str) -> Schedule:
    """Read the text form of a schedule.

    Raises:
        ScheduleError: a line does not start with "rank N |" in order, or holds an unknown word.
    """
    programs = []
    for rank, line in enumerate(filter(str.strip, text.splitlines())):
        head, bar, body = line.partition("|")
        if not bar or head.split() != ["rank", str(rank)]:
            raise ScheduleError(
                f"line {rank + 1} must start with 'rank {rank} |', got {line[:40]!r}"
            )
        programs.append(tuple(parse_instruction(word) for word in body.split()))
    return Schedule(tuple(programs))


def marked_text(schedule: Schedule, positions: dict[int, int]) -> str:
    """Write a schedule with the instruction at `positions[rank]` of each given rank in >> <<."""
    lines = []
    for rank, program in enumerate(schedule.programs):
        words = [instruction_to_text(instruction) for instruction in program]
        if rank in positions:
            words[positions[rank]] = f">>{words[positions[rank]]}<<"
        lines.append(
            f"rank {rank} | " + " ".join(words) + ("   <-- here" if rank in positions else "")
        )
    return "\n".join(lines)
