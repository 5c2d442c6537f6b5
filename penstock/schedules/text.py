"""A schedule as text, both ways: one line a rank, one word an instruction.

    word      instruction                    word      instruction
    0F3       Forward(0, 3)                  0F3>1     SendActivation(0, 3, peer=1)
    0f3       Forward(0, 3), inputs kept     1F3<0     ReceiveActivation(1, 3, peer=0)
    0R3       Recompute(0, 3)                1B3>0     SendGradient(1, 3, peer=0)
    0B3       Backward(0, 3)                 0B3<1     ReceiveGradient(0, 3, peer=1)
    0I3       BackwardInput(0, 3)            1F3?0     PostReceive(1, 3, peer=0, gradient=False)
    0W3       BackwardWeight(0, 3)           0B3?1     PostReceive(0, 3, peer=1, gradient=True)
    0H3       Offload(0, 3)                  0D3       Fetch(0, 3)
    0C        CommitStatistics(0)            0F3@2     Forward(0, 3), with weights updated twice
    0G        ReduceGradients(0)             0U        UpdateWeights(0)

The first number is the stage that acts, the number after the letter the micro-batch.
"""

import re

from penstock.errors import ScheduleError

from .ir import WORDS, Instruction, Schedule

_NUMBER = re.compile(r"\d+")


def parse_instruction(word: str) -> Instruction:
    """Read one word; a ScheduleError if it is not an instruction."""
    shape = _NUMBER.sub("0", word)
    if shape in WORDS:
        return WORDS[shape](*map(int, _NUMBER.findall(word)))
    whole = re.split("[<>?]", shape)[0]
    if whole != shape and whole in WORDS:
        raise ScheduleError(
            f"{word!r}: only F and B have a peer (activations and gradients), not {whole[1]!r}"
        )
    raise ScheduleError(
        f"{word!r} is not an instruction; expected a word such as 0F3, 0R3, 0B3, 0F3>1 or 0C"
    )


def to_text(schedule: Schedule) -> str:
    """Write a schedule: one line a rank, words set in columns."""
    rows = [list(map(str, program)) for program in schedule.programs]
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
        words = list(map(str, program))
        if rank in positions:
            words[positions[rank]] = f">>{words[positions[rank]]}<<"
        lines.append(
            f"rank {rank} | " + " ".join(words) + ("   <-- here" if rank in positions else "")
        )
    return "\n".join(lines)
