"""List scheduling: a rank that is free begins the first, by a policy, of what could start.

What comes out is a run of the ranks under given costs, so it ends, for any number of stages, ranks
and micro-batches: there is nothing to divide, and no rank waits for what cannot come.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate
from math import inf
from typing import NamedTuple

from .costs import Costs, per_edge, per_stage
from .ir import Backward, BackwardInput, BackwardWeight, Forward, Instruction, Schedule

Step = tuple[bool, int, int]
"""(is a backward, stage, micro-batch): a forward, or the backward of its inputs."""
Priority = Callable[[bool, int, int], tuple[int, ...]]
"""What a step is compared by: the least begins first."""
Kind = type[Forward | Backward | BackwardInput | BackwardWeight]


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What a free rank begins with, and how much it may keep.

    `live[rank]` is the most forwards on a rank whose backward, or its weights' part, has not
    ended; `ahead[stage]` the most whose backward has not begun.  A rank leaves room for a forward
    of each later stage of its own, which alone could free what the earlier ones keep.

    Of the steps that could start, that of the least `priority` begins; the weights' part of a
    backward only where none could, the oldest first.  With `patient` it rather waits for a step
    that would come in before it ends.

    With `orders`, each rank takes its steps in that order instead, and may keep what it needs for
    that.  Without `divides`, backwards are whole.
    """

    live: Sequence[int]
    priority: Priority = lambda is_backward, stage, microbatch: ()
    ahead: Sequence[int] | None = None
    orders: Sequence[Sequence[Step]] | None = None
    patient: bool = False
    divides: bool = True


class Slot(NamedTuple):
    """One instruction and when it runs."""

    kind: Kind
    stage: int
    microbatch: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Timetable:
    """When each rank runs what; a gradient of a stage is on its way for `wire_s[stage]`."""

    rows: Sequence[Sequence[Slot]]
    wire_s: Sequence[float]

    @property
    def step_s(self) -> float:
        """The time from the first start to the last end."""
        return max(row[-1].end_s for row in self.rows)

    @property
    def length(self) -> tuple[float, float]:
        """The time of the step, then that of all ranks from their own first start to last end."""
        return self.step_s, sum(row[-1].end_s - row[0].start_s for row in self.rows)

    def schedule(self) -> Schedule:
        """Return the instructions, with one whole Backward for two parts where it is no later.

        The parts are joined where the second follows the first at once, and the stage before uses
        the gradient only once both are done: nothing then runs at another time, and less is kept.
        """
        begun = {
            (slot.stage, slot.microbatch): slot.start_s
            for row in self.rows
            for slot in row
            if slot.kind is BackwardInput
        }
        return Schedule(tuple(tuple(self._joined(row, begun)) for row in self.rows))

    def _joined(
        self, row: Sequence[Slot], begun: dict[tuple[int, int], float]
    ) -> Iterator[Instruction]:
        slots = iter((*row, None))
        slot = next(slots)
        while slot is not None:
            kind, stage, microbatch, _, _ = slot
            after = next(slots)
            if (
                kind is BackwardInput
                and after is not None
                and after[:3] == (BackwardWeight, stage, microbatch)
                and begun.get((stage - 1, microbatch), inf) >= after.end_s + self.wire_s[stage]
            ):
                kind, after = Backward, next(slots)
            yield kind(stage, microbatch)
            slot = after


def order_of(schedule: Schedule) -> list[list[Step]]:
    """Return the order of forwards and backwards on each rank, for `Policy.orders`."""
    return [
        [
            (not isinstance(x, Forward), x.stage, x.microbatch)
            for x in program
            if isinstance(x, Forward | Backward | BackwardInput)
        ]
        for program in schedule.programs
    ]


def best_of(
    policies: Iterable[Policy], ranks: Sequence[int], num_microbatches: int, costs: Costs
) -> Schedule:
    """Return the schedule of the policy whose step is the shortest under `costs`.

    `ranks[stage]` is who runs a stage.

    Raises:
        ConfigError: `costs` are those of another number of stages.
    """
    tables = (timetable(policy, ranks, num_microbatches, costs) for policy in policies)
    return min(tables, key=lambda table: table.length).schedule()


def timetable(
    policy: Policy, ranks: Sequence[int], num_microbatches: int, costs: Costs
) -> Timetable:
    """Run the ranks by `policy`, each instruction for as long as `costs` say.

    Raises:
        ConfigError: `costs` are those of another number of stages.
    """
    num_stages = len(ranks)
    transfer_s = per_edge(costs.transfer_s)
    wire_s = [
        0 if stage == 0 or ranks[stage - 1] == rank else transfer_s(stage - 1, stage)
        for stage, rank in enumerate(ranks)
    ]
    of_inputs, of_weights = costs.parts(num_stages)
    seconds = {
        Forward: per_stage(costs.forward_s, num_stages, "forward_s"),
        Backward: per_stage(costs.backward_s, num_stages, "backward_s"),
        BackwardInput: of_inputs,
        BackwardWeight: of_weights,
    }
    run = _Run(policy, ranks, num_microbatches, seconds, wire_s)
    run.to_the_end()
    return Timetable(run.rows, wire_s)


class _Run:
    """The ranks on their way through a step."""

    def __init__(
        self,
        policy: Policy,
        ranks: Sequence[int],
        num_microbatches: int,
        seconds: dict[Kind, tuple[float, ...]],
        wire_s: Sequence[float],
    ) -> None:
        self.policy, self.ranks, self.num_microbatches = policy, ranks, num_microbatches
        self.seconds, self.wire_s = seconds, wire_s
        self.own: list[list[int]] = [[] for _ in range(1 + max(ranks))]
        for stage, rank in enumerate(ranks):
            self.own[rank].append(stage)
        # [is a backward][stage][micro-batch]: when all it needs is there
        self.ready_s = [[[inf] * num_microbatches for _ in ranks] for _ in (False, True)]
        self.ready_s[False][0] = [0] * num_microbatches
        # [is a backward][stage]: how many have begun; each stage takes micro-batches in order
        self.begun = [[0 for _ in ranks] for _ in (False, True)]
        # [rank]: the (stage, micro-batch) of weights' parts still to run
        self.left: list[deque[tuple[int, int]]] = [deque() for _ in self.own]
        self.live = [0 for _ in self.own]
        self.free_s: list[float] = [0 for _ in self.own]
        self.limit = [self._limit(stage) for stage in range(len(ranks))]
        self.rows: list[list[Slot]] = [[] for _ in self.own]
        # (when, whom) to look again
        self.calls: list[tuple[float, int]] = [(0, rank) for rank in range(len(self.own))]

    def _limit(self, stage: int) -> int:
        """Return below how many a rank must keep for the next forward of `stage` to begin."""
        rank, policy = self.ranks[stage], self.policy
        if policy.orders is None:
            own = self.own[rank]
            return max(policy.live[rank], len(own)) - (len(own) - 1 - own.index(stage))
        changes = (-1 if is_backward else 1 for is_backward, _, _ in policy.orders[rank])
        return max(policy.live[rank], *accumulate(changes))

    def to_the_end(self) -> None:
        """Run everything."""
        while self.calls:
            now_s, rank = heappop(self.calls)
            if self.free_s[rank] > now_s:
                continue
            step, soon_s = self._next(rank, now_s)
            if step is not None:
                self._begin(rank, *step, now_s)
            elif self.left[rank]:
                self._fill(rank, now_s, soon_s)

    def _next(self, rank: int, now_s: float) -> tuple[Step | None, float]:
        """Return the step that begins, if any, and when the next one can whose time is known."""
        best, least, soon_s = None, None, inf
        for step in self._allowed(rank):
            is_backward, stage, microbatch = step
            ready_s = self.ready_s[is_backward][stage][microbatch]
            if ready_s > now_s:
                soon_s = min(soon_s, ready_s)
                continue
            key = self.policy.priority(is_backward, stage, microbatch)
            if least is None or key < least:
                best, least = step, key
        return best, soon_s

    def _allowed(self, rank: int) -> Iterator[Step]:
        """Yield the steps that order and memory let come next, whether they are ready or not."""
        forwards, backwards = self.begun
        ahead, orders = self.policy.ahead, self.policy.orders
        if orders is not None:
            done = sum(forwards[s] + backwards[s] for s in self.own[rank])
            for step in orders[rank][done : done + 1]:
                if step[0] or self.live[rank] < self.limit[step[1]]:
                    yield step
            return
        for stage in self.own[rank]:
            number, backward = forwards[stage], backwards[stage]
            if (
                number < self.num_microbatches
                and self.live[rank] < self.limit[stage]
                and (ahead is None or number - backward < ahead[stage])
            ):
                yield False, stage, number
            if backward < number:
                yield True, stage, backward

    def _begin(
        self, rank: int, is_backward: bool, stage: int, microbatch: int, now_s: float
    ) -> None:
        divides = self.policy.divides
        kind: Kind = Forward if not is_backward else BackwardInput if divides else Backward
        end_s = self._run(rank, kind, stage, microbatch, now_s)
        self.begun[is_backward][stage] += 1
        if not is_backward:
            self.live[rank] += 1
        elif divides:
            self.left[rank].append((stage, microbatch))
        else:
            self.live[rank] -= 1
        target = stage - 1 if is_backward else stage + 1
        if target == len(self.ranks):  # the loss: its gradient is there at once
            self.ready_s[True][stage][microbatch] = end_s
        elif target >= 0:
            arrival_s = end_s + self.wire_s[max(stage, target)]
            self.ready_s[is_backward][target][microbatch] = arrival_s
            heappush(self.calls, (arrival_s, self.ranks[target]))

    def _fill(self, rank: int, now_s: float, soon_s: float) -> None:
        stage, microbatch = self.left[rank][0]
        if self.policy.patient and soon_s < now_s + self.seconds[BackwardWeight][stage]:
            return  # what comes in calls the rank again
        self.left[rank].popleft()
        self._run(rank, BackwardWeight, stage, microbatch, now_s)
        self.live[rank] -= 1

    def _run(self, rank: int, kind: Kind, stage: int, microbatch: int, now_s: float) -> float:
        end_s = now_s + self.seconds[kind][stage]
        self.rows[rank].append(Slot(kind, stage, microbatch, now_s, end_s))
        self.free_s[rank] = end_s
        heappush(self.calls, (end_s, rank))
        return end_s
