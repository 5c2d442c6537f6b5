"""The instructions of a schedule sorted by stage and kind, for the laws.

A schedule may have millions of instructions, so laws compare whole lists, which is fast.  Only a
law that finds a fault goes through them again, to locate it.
"""

from collections import defaultdict
from collections.abc import Iterator
from itertools import chain
from operator import lt
from typing import NamedTuple, TypeVar, cast

from penstock.errors import ScheduleError
from penstock.schedules.ir import COMPUTES, Communication, Compute, Instruction, Schedule
from penstock.schedules.text import marked_text
from penstock.schedules.transfers import Transfers, neighbours

Kind = TypeVar("Kind", bound=Instruction | Communication)
Places = dict[int, int]
"""The position of the instruction of each micro-batch."""


class Lane(NamedTuple):
    """The micro-batches of some instructions, in program order, and their positions."""

    microbatches: list[int]
    positions: list[int]


class Lanes:
    """The positions of each stage's instructions, by kind, in order; on one rank each, or a
    ScheduleError.

    `producers` and `consumers` are the neighbours of the stages that have any.
    """

    def __init__(self, schedule: Schedule, transfers: Transfers) -> None:
        self.schedule = schedule
        self.producers, self.consumers = neighbours(transfers)
        self._lanes: dict[tuple[type, int], list[int]] = {}
        self._microbatches: dict[tuple[int, tuple[type, ...]], list[int]] = {}
        self._by_peer: dict[tuple[type, int], dict[int, Lane]] = {}
        self._ranks: dict[int, int] = {}
        for rank, program in enumerate(schedule.programs):
            lanes: dict[tuple[type, int], list[int]] = defaultdict(list)
            for position, instruction in enumerate(program):
                lanes[instruction.__class__, instruction.stage].append(position)
            for stage in {stage for _, stage in lanes}:
                if self._ranks.setdefault(stage, rank) != rank:
                    raise ScheduleError(
                        f"stage {stage} runs on rank {self._ranks[stage]} and on rank {rank}; a "
                        f"stage lives on one rank.\n{schedule}"
                    )
            self._lanes.update(lanes)
        self.num_stages = 1 + max((stage for _, stage in self._lanes), default=-1)
        computes = [key for key in self._lanes if key[0] in COMPUTES]
        largest = [max(self.microbatches(stage, kind)) for kind, stage in computes]
        self.num_microbatches = 1 + max(largest, default=-1)

    def positions(self, stage: int, *kinds: type) -> list[int]:
        """List the positions of `stage`'s instructions of some kinds in its rank's program."""
        lists = [places for kind in kinds if (places := self._lanes.get((kind, stage)))]
        return lists[0] if len(lists) == 1 else sorted(chain.from_iterable(lists))

    def each(self, stage: int, *kinds: type[Kind]) -> Iterator[tuple[int, Kind]]:
        """Yield (position, instruction) for the instructions of some kinds on `stage`."""
        positions = self.positions(stage, *kinds)
        program = self.schedule.programs[self._ranks.get(stage, 0)]
        instructions = cast(Iterator[Kind], map(program.__getitem__, positions))
        return zip(positions, instructions, strict=True)

    def microbatches(self, stage: int, *kinds: type[Compute]) -> list[int]:
        """List the micro-batches of the instructions of some kinds on `stage`, as they come."""
        key = stage, kinds
        if key not in self._microbatches:
            self._microbatches[key] = [x.microbatch for _, x in self.each(stage, *kinds)]
        return self._microbatches[key]

    def computes(self, stage: int, *kinds: type[Compute]) -> Places:
        """Map each micro-batch to the position of its instruction of one of the kinds."""
        positions = self.positions(stage, *kinds)
        return dict(zip(self.microbatches(stage, *kinds), positions, strict=True))

    def by_peer(self, kind: type[Communication], stage: int) -> dict[int, Lane]:
        if (kind, stage) not in self._by_peer:
            self._by_peer[kind, stage] = self._find_by_peer(kind, stage)
        return self._by_peer[kind, stage]

    def _find_by_peer(self, kind: type[Communication], stage: int) -> dict[int, Lane]:
        messages = [x for _, x in self.each(stage, kind)]
        peers = {x.peer for x in messages}
        if len(peers) == 1:
            microbatches = [x.microbatch for x in messages]
            return {peers.pop(): Lane(microbatches, self.positions(stage, kind))}
        lanes = {peer: Lane([], []) for peer in peers}
        for position, x in self.each(stage, kind):
            lanes[x.peer].microbatches.append(x.microbatch)
            lanes[x.peer].positions.append(position)
        return lanes

    def messages(self, kind: type[Communication], stage: int, peer: int) -> Places:
        """Map each micro-batch to the position of its message between `stage` and `peer`."""
        lane = self.by_peer(kind, stage).get(peer)
        return {} if lane is None else dict(zip(lane.microbatches, lane.positions, strict=True))

    def fault(self, stage: int, position: int, problem: str) -> ScheduleError:
        """Make the error that states an instruction's problem, and marks it in the schedule."""
        rank = self._ranks[stage]
        return ScheduleError(
            f"rank {rank}, {self.schedule.programs[rank][position]}: {problem}.\n"
            + marked_text(self.schedule, {rank: position})
        )


def first_too_early(uses: Places, needed: Places) -> int | None:
    """Return the first micro-batch with a use before its need; None if there is none."""
    if needed.keys() >= uses.keys() and all(map(lt, map(needed.__getitem__, uses), uses.values())):
        return None
    return next(i for i, position in uses.items() if needed.get(i, position) >= position)
