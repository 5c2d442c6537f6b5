"""The law of captured runs: with one queue of messages per rank, every program ends."""

from collections import Counter, defaultdict
from dataclasses import dataclass

from penstock.errors import ScheduleError
from penstock.schedules.ir import Message, Program, Receive, Schedule, Send
from penstock.schedules.message_groups import (
    Group,
    Groups,
    cannot_run,
    communication,
    message_positions,
)

from .lanes import Lanes


@dataclass(frozen=True, slots=True)
class OneQueue:
    """Check that all programs end if each rank has one queue of computes and one of `groups`.

    A group begins when the groups before it on its rank have ended, and all computes before its
    sends too.  It ends when each of its messages runs on both ranks.  Then what it receives is
    there; computes after a receive wait for that.  Messages between stages of one rank do not
    cross, and wait for nothing.  Messages from one rank to another are matched by their order.

    The law takes for granted that `messages` and `ends` hold.  It does not know how the groups
    were made.

    Raises:
        ScheduleError: ranks wait for each other for ever; the groups of a rank do not hold each of
            its messages once; two ranks have the messages from one to the other in two orders.
    """

    groups: Groups

    def __call__(self, lanes: Lanes) -> None:
        schedule = lanes.schedule
        self._check_messages(schedule)
        began: Counter[Message] = Counter()
        pairs = zip(schedule.programs, self.groups, strict=True)
        queues = [_Queues(program, groups) for program, groups in pairs]
        while sum(queue.advance(began) for queue in queues):  # every rank, in each round
            pass
        every = ((rank, queue.spot(began)) for rank, queue in enumerate(queues))
        spots = {rank: spot for rank, spot in every if spot is not None}
        if spots:
            raise cannot_run(schedule, spots, "take the groups that `message_groups` makes")

    def _check_messages(self, schedule: Schedule) -> None:
        """Check that the groups have all messages, and those of two ranks in the same order."""
        grouped = [[n for group in groups for n in group] for groups in self.groups]
        crossing = message_positions(schedule)
        if list(map(sorted, grouped)) != crossing:
            raise ScheduleError(
                f"the groups hold the messages at {grouped}, rank by rank, and the programs have "
                f"them at {crossing}; each must be in one group.\n{schedule}"
            )
        sent: dict[tuple[int, int], list[Message]] = defaultdict(list)
        received: dict[tuple[int, int], list[Message]] = defaultdict(list)
        rank_of = schedule.ranks
        for rank, positions in enumerate(grouped):
            for n in positions:
                x = communication(schedule.programs[rank], n)
                peer = rank_of[x.peer]
                if isinstance(x, Send):
                    sent[rank, peer].append(x.message)
                else:
                    received[peer, rank].append(x.message)
        for (source, target), messages in sent.items():
            if received[source, target] != messages:
                raise ScheduleError(
                    f"rank {source} sends {messages} to rank {target}, which receives "
                    f"{received[source, target]}: messages of two ranks are matched by their "
                    f"order, so sort the receives of a group by their sends.\n{schedule}"
                )


class _Queues:
    """The two queues of a rank, and how far they are.

    `num_ended` groups have ended; `has_begun`: the next one runs.
    """

    def __init__(self, program: Program, groups: tuple[Group, ...]) -> None:
        self.groups = groups
        self.messages = [[communication(program, n).message for n in group] for group in groups]
        self.sends = [[n for n in group if isinstance(program[n], Send)] for group in groups]
        # The compute queue stops at each receive whose group has not ended, and at the end.
        receives = (n for group in groups for n in group if isinstance(program[n], Receive))
        self.stops = sorted(receives, reverse=True)
        self.ended: set[int] = set()
        self.length = len(program)
        self.num_ended = 0
        self.has_begun = False

    def advance(self, began: Counter[Message]) -> bool:
        """Go on as far as the other ranks allow; tell whether a group began or ended.

        `began` counts the ranks on which each message runs or has run.
        """
        before = self.num_ended, self.has_begun
        if self.num_ended == len(self.groups):
            return False
        if not self.has_begun and max(self.sends[self.num_ended], default=-1) < self._computed():
            self.has_begun = True
            began.update(self.messages[self.num_ended])
        if self.has_begun and all(began[m] == 2 for m in self.messages[self.num_ended]):
            self.ended.update(self.groups[self.num_ended])
            self.has_begun = False
            self.num_ended += 1
        return before != (self.num_ended, self.has_begun)

    def spot(self, began: Counter[Message]) -> int | None:
        """Return the position of the first message that holds the rank up; None: none does."""
        if self.num_ended == len(self.groups):
            return None
        pairs = zip(self.groups[self.num_ended], self.messages[self.num_ended], strict=True)
        return next(position for position, message in pairs if began[message] < 2)

    def _computed(self) -> int:
        """Return the position at which the queue of computes waits for a receive, or its end."""
        while self.stops and self.stops[-1] in self.ended:
            self.stops.pop()
        return self.stops[-1] if self.stops else self.length
