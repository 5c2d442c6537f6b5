"""A schedule sorted by what its instructions do: what the laws look at."""

from collections import defaultdict
from collections.abc import Iterator
from itertools import chain
from typing import TypeVar, cast

from penstock.errors import ScheduleError
from penstock.schedules.ir import Communication, Compute, Instruction, Schedule
from penstock.schedules.text import marked_text
from penstock.schedules.transfers import Transfers, neighbours

Kind = TypeVar("Kind", bound=Instruction)


class Lanes:
    """Where the instructions of each kind stand that a stage runs, in order.

    `producers` and `consumers` are the neighbours of the stages that have any.

    Raises:
        ScheduleError: a stage runs on two ranks.
    """

    def __init__(self, schedule: Schedule, transfers: Transfers) -> None:
        self.schedule = schedule
        self.num_stages, self.num_microbatches = schedule.num_stages, schedule.num_microbatches
        self.producers, self.consumers = neighbours(transfers)
        self._lanes: dict[tuple[type, int], list[int]] = {}
        self._ranks: dict[int, int] = {}
        for rank, program in enumerate(schedule.programs):
            lanes: dict[tuple[type, int], list[int]] = defaultdict(list)
            for position, instruction in enumerate(program):
                lanes[type(instruction), instruction.stage].append(position)
            for stage in {stage for _, stage in lanes}:
                if self._ranks.setdefault(stage, rank) != rank:
                    raise ScheduleError(
                        f"stage {stage} runs on rank {self._ranks[stage]} and on rank {rank}; a "
                        f"stage lives on one rank.\n{schedule}"
                    )
            self._lanes.update(lanes)

    def positions(self, stage: int, *kinds: type) -> list[int]:
        """List where the instructions of some kinds stand in the program that runs `stage`."""
        found = [places for kind in kinds if (places := self._lanes.get((kind, stage)))]
        return found[0] if len(found) == 1 else sorted(chain.from_iterable(found))

    def each(self, stage: int, *kinds: type[Kind]) -> Iterator[tuple[int, Kind]]:
        """Yield (position, instruction) for the instructions of some kinds on `stage`."""
        program = self.schedule.programs[self._ranks.get(stage, 0)]
        for position in self.positions(stage, *kinds):
            yield position, cast(Kind, program[position])

    def computes(self, stage: int, *kinds: type[Compute]) -> dict[int, int]:
        """Map each micro-batch to where its instruction of one of the kinds stands."""
        return {x.microbatch: position for position, x in self.each(stage, *kinds)}

    def messages(self, kind: type[Communication], stage: int, peer: int) -> dict[int, int]:
        """Map each micro-batch to where `stage` sends it to `peer`, or receives it from there."""
        return {x.microbatch: n for n, x in self.each(stage, kind) if x.peer == peer}

    def fault(self, stage: int, position: int, problem: str) -> ScheduleError:
        """Make the error that says what is wrong with an instruction, and marks it."""
        rank = self._ranks[stage]
        return ScheduleError(
            f"rank {rank}, {self.schedule.programs[rank][position]}: {problem}.\n"
            + marked_text(self.schedule, {rank: position})
        )
