"""Group the messages of each rank for a run with one queue of messages per rank.

`walk` lets a send leave its message and go on.  In a CUDA graph a send waits for its receiver.
"""

from collections.abc import Mapping

from penstock.errors import ScheduleError

from .ir import Communication, Message, Program, Receive, Schedule, Send
from .text import marked_text

Group = tuple[int, ...]
"""The program positions of messages that run together, in order."""
Groups = tuple[tuple[Group, ...], ...]
"""The groups of each rank, in order."""
Place = tuple[int, int]
"""(rank, program position) of a send or a receive."""


def message_groups(schedule: Schedule) -> Groups:
    """Return, for each rank, the groups in which its messages enter its queue.

    A captured step replays the sends and receives of a rank one after another.  A send ends when
    its receive runs, so two ranks that both send first wait for each other.  The messages of a
    group run together:

        rank 0 | a> b<       a> waits for a<, behind b>, which waits for b<, behind a>
        rank 1 | b> a<
        rank 0 | (a> b<)     b< runs beside a>, so b> ends, then a< runs
        rank 1 | (b>) (a<)

    Each message is alone in its group, and groups are in program order, until all ranks wait.
    Then the receive of a send that runs joins the group that runs on its rank: the one that stands
    nearest to that in its program.  A receive needs nothing but room, and it has what it waits for
    at once, so the group ends no later.  The same schedule always gives the same groups; the law
    `OneQueue` proves them before each capture.

    Args:
        schedule: lowered, and proved with `verify`.

    Returns:
        The program positions of the messages of each group: at most one send, and receives, those
        from one rank in the order in which it sends them.  Room for a receive that has joined an
        earlier group is kept from there.  Messages between stages of one rank are left out.

    Raises:
        ScheduleError: ranks wait for each other even if sends do not wait; `verify` finds it too.
    """
    queues = _Queues(schedule)
    while True:
        while sum(map(queues.begin_next, range(schedule.num_ranks))):  # all ranks, in each round
            pass
        waiting = queues.waiting()
        if not waiting:
            return queues.groups()
        receives = [queues.partners[place] for place in waiting if place in queues.sends]
        if not receives:
            spots = dict(reversed(waiting))
            advice = "here no send runs; let each stand before the receives that depend on it"
            raise cannot_run(schedule, dict(sorted(spots.items())), advice)
        queues.join(min(receives, key=queues.distance))


class _Queues:
    """The groups of each rank that have begun; its last one runs.

    A message crosses when its group has begun on both ranks.  The value of a send is there when
    the group of all messages before it in its program have ended.
    """

    def __init__(self, schedule: Schedule) -> None:
        positions = message_positions(schedule)
        self.begun: list[list[list[Place]]] = [[] for _ in positions]
        self.has_begun: set[Place] = set()
        self.rest = [iter([(rank, n) for n in queue]) for rank, queue in enumerate(positions)]
        sends: dict[Message, Place] = {}
        receives: dict[Message, Place] = {}
        for rank, queue in enumerate(positions):
            for n in queue:
                x = communication(schedule.programs[rank], n)
                (sends if isinstance(x, Send) else receives)[x.message] = rank, n
        self.sends = set(sends.values())
        self.partners = {place: receives[message] for message, place in sends.items()}
        self.partners.update({place: sends[message] for message, place in receives.items()})

    def begin_next(self, rank: int) -> bool:
        """Begin the next group of a rank if the one before has ended; tell whether it began."""
        if self._waiting(rank):
            return False
        place = next((place for place in self.rest[rank] if place not in self.has_begun), None)
        if place is None:
            return False
        self.begun[rank].append([])
        self.join(place)
        return True

    def join(self, place: Place) -> None:
        """Let a message run in the last group of its rank."""
        self.begun[place[0]][-1].append(place)
        self.has_begun.add(place)

    def waiting(self) -> list[Place]:
        """List the messages that run and do not cross, rank by rank."""
        return [place for rank in range(len(self.begun)) for place in self._waiting(rank)]

    def _waiting(self, rank: int) -> list[Place]:
        running = [place for group in self.begun[rank][-1:] for place in group]
        return [place for place in running if self.partners[place] not in self.has_begun]

    def distance(self, place: Place) -> Place:
        """Return how far behind the group that runs on its rank a message stands, and the rank."""
        rank, position = place
        return position - self.begun[rank][-1][0][1], rank

    def groups(self) -> Groups:
        """Return the groups of all ranks, in each the send first and receives by their sends."""

        def order(place: Place) -> tuple[bool, Place]:
            return place not in self.sends, self.partners[place]

        return tuple(
            tuple(tuple(n for _, n in sorted(group, key=order)) for group in own)
            for own in self.begun
        )


def message_positions(schedule: Schedule) -> list[list[int]]:
    """List, for each rank, the positions of its messages with other ranks, in order."""
    rank_of = schedule.ranks
    return [
        [n for n, x in enumerate(program) if isinstance(x, Communication) and rank_of[x.peer] != r]
        for r, program in enumerate(schedule.programs)
    ]


def communication(program: Program, position: int) -> Send | Receive:
    """Return the send or the receive at a position."""
    x = program[position]
    assert isinstance(x, Send | Receive)
    return x


def cannot_run(schedule: Schedule, spots: Mapping[int, int], advice: str) -> ScheduleError:
    """Make the error that names the message at which each rank waits, and its peer.

    Args:
        schedule: the schedule that does not end.
        spots: the program position of that message, by rank.
        advice: what to change, a clause.
    """
    waits = []
    for rank, position in spots.items():
        x = communication(schedule.programs[rank], position)
        waits.append(f"rank {rank} waits at {x} for rank {schedule.ranks[x.peer]}")
    return ScheduleError(
        f"the schedule cannot run with one queue of messages per rank: {', '.join(waits)}. In a "
        f"CUDA graph a send ends only when its receive runs; {advice}.\n"
        f"{marked_text(schedule, dict(spots))}"
    )
