"""A schedule in numbers, so that it is priced many times without being read again.

Every instruction is an integer, its code:

    k >= 0        takes the seconds of price k: of a kind of instruction on a stage
    -2 m - 1      sends message m
    -2 m - 2      receives message m
"""

from dataclasses import dataclass

from penstock.schedules import ir
from penstock.schedules.collection import collection_paused

Edge = tuple[bool, int, int]
"""(is a gradient, from stage, to stage) of a message."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """A lowered schedule in numbers.

    `codes[rank]` are those of its program.  `prices[k]` is one of the instructions that take
    price k, `edges[edge_of[m]]` is the edge along which message m goes.
    """

    schedule: ir.Schedule
    ranks: tuple[int, ...]
    """The rank that runs each stage."""
    codes: tuple[list[int], ...]
    prices: tuple[ir.Instruction, ...]
    edges: tuple[Edge, ...]
    edge_of: list[int]


@collection_paused()
def compiled(schedule: ir.Schedule) -> Compiled:
    """Write a schedule with its communication in numbers."""
    numbers: dict[tuple[type[ir.Instruction], int], int] = {}
    prices: list[ir.Instruction] = []
    edges: dict[Edge, int] = {}
    messages: dict[ir.Message, int] = {}
    edge_of: list[int] = []

    def message(x: ir.Send | ir.Receive) -> int:
        key = x.message
        number = messages.get(key)
        if number is None:
            number = messages[key] = len(edge_of)
            edge_of.append(edges.setdefault(key[:3], len(edges)))
        return number

    def code(x: ir.Instruction) -> int:
        if isinstance(x, ir.Send):
            return -2 * message(x) - 1
        if isinstance(x, ir.Receive):
            return -2 * message(x) - 2
        key = x.__class__, x.stage
        number = numbers.get(key)
        if number is None:
            number = numbers[key] = len(prices)
            prices.append(x)
        return number

    codes = tuple(list(map(code, program)) for program in schedule.programs)
    return Compiled(schedule, schedule.ranks, codes, tuple(prices), tuple(edges), edge_of)
