"""Foretell when each instruction of a schedule runs, from what each costs."""

from collections.abc import Callable, Iterable
from functools import cache, partial
from itertools import repeat
from typing import assert_never

from penstock.schedules import ir
from penstock.schedules.collection import collection_paused
from penstock.schedules.costs import Costs, per_edge, per_stage
from penstock.schedules.passes import add_communication
from penstock.schedules.transfers import Transfers, chain_transfers
from penstock.schedules.walk import Run, walk_runs
from penstock.trace.timeline import Span, Timeline

Watch = Callable[[Iterable[Run], int], Iterable[Run]]
"""Yields on the runs of a walk with so many instructions, to show how far it is."""
_span = partial(tuple.__new__, Span)  # what Span() does in the end, without Python in between


@collection_paused()
def simulate(
    schedule: ir.Schedule,
    costs: Costs,
    watch: Watch | None = None,
    *,
    transfers: Transfers | None = None,
) -> Timeline:
    """Price `schedule`: each rank runs its program in order and starts each instruction when free.

    A send takes no time; its message arrives `transfer_s` later (at once on the same rank), and a
    receive ends no earlier.
    Where the schedule has no communication yet, it is added for `transfers`; without these, for a
    chain in which every stage feeds the next.
    The step begins at 0 seconds; exact costs (ints, Fractions) give exact times.  `watch` is given
    the runs of the walk and the number of instructions, and yields them on, to show how far it is.

    Raises:
        ConfigError: `costs` lacks a stage or an edge of the schedule.
        ScheduleError: ranks would wait for each other for ever.
    """
    schedule = _with_communication(schedule, transfers)
    price = _Prices(schedule, costs)
    ends_s: list[list[float]] = [[0] for _ in schedule.programs]
    runs: Iterable[Run] = walk_runs(schedule)
    if watch is not None:
        runs = watch(runs, sum(map(len, schedule.programs)))
    for rank, start, stop in runs:
        price.run(schedule.programs[rank][start:stop], ends_s[rank])
    return Timeline(tuple(_spans(schedule, ends_s)))


def _spans(schedule: ir.Schedule, ends_s: list[list[float]]) -> Iterable[Span]:
    """Yield the spans of each rank, whose instructions follow one another without a gap."""
    for rank, (program, of_rank) in enumerate(zip(schedule.programs, ends_s, strict=True)):
        fields = zip(repeat(rank), program, of_rank, of_rank[1:], repeat(0))
        yield from map(_span, fields)


def _with_communication(schedule: ir.Schedule, transfers: Transfers | None) -> ir.Schedule:
    if any(isinstance(instruction, ir.Communication) for instruction in schedule.instructions):
        return schedule
    if transfers is None:
        transfers = chain_transfers(schedule.num_stages)
    return add_communication(schedule, transfers)


class _Prices:
    """What each instruction of a schedule takes, and when the messages on their way arrive."""

    def __init__(self, schedule: ir.Schedule, costs: Costs) -> None:
        ranks, transfer_s = schedule.ranks, per_edge(costs.transfer_s)
        self._wire_s = cache(lambda s, peer: 0 if ranks[s] == ranks[peer] else transfer_s(s, peer))
        self._arrival_s: dict[ir.Message, float] = {}
        one_of_each = {x.__class__: x for x in schedule.instructions}
        seconds = _seconds(costs, len(ranks))
        self._seconds = {kind: seconds(x) for kind, x in one_of_each.items()}

    def run(self, instructions: ir.Program, ends_s: list[float]) -> None:
        """Add when each of the instructions ends; they follow on the last of `ends_s`."""
        seconds, arrival_s, wire_s = self._seconds, self._arrival_s, self._wire_s
        now_s = ends_s[-1]
        for x in instructions:
            if isinstance(x, ir.Send):
                arrival_s[x.message] = now_s + wire_s(x.stage, x.peer)
            elif isinstance(x, ir.Receive):
                came_s = arrival_s.pop(x.message)
                if came_s > now_s:
                    now_s = came_s
            else:
                now_s += seconds[x.__class__][x.stage]
            ends_s.append(now_s)


def _seconds(  # noqa: C901 - one flat match
    costs: Costs, num_stages: int
) -> Callable[[ir.Instruction], tuple[float, ...]]:
    """Return what spells out the seconds of an instruction's kind on each stage.

    Raises:
        ConfigError: `costs` lacks a stage.
    """
    nothing = (0,) * num_stages
    forward_s = per_stage(costs.forward_s, num_stages, "forward_s")
    backward_s = per_stage(costs.backward_s, num_stages, "backward_s")
    input_s, weight_s = costs.parts(num_stages)
    recompute_s = costs.again(num_stages)
    reduce_s = per_stage(costs.reduce_s, num_stages, "reduce_s")
    offload_s = per_stage(costs.offload_s, num_stages, "offload_s")
    update_s = per_stage(costs.update_s, num_stages, "update_s")
    fetch_s = per_stage(costs.fetch_s, num_stages, "fetch_s")

    def seconds(instruction: ir.Instruction) -> tuple[float, ...]:  # noqa: C901, PLR0912
        match instruction:
            case ir.Forward():
                return forward_s
            case ir.Recompute():
                return recompute_s
            case ir.Backward():
                return backward_s
            case ir.BackwardInput():
                return input_s
            case ir.BackwardWeight():
                return weight_s
            case ir.ReduceGradients():
                return reduce_s
            case ir.UpdateWeights():
                return update_s
            case ir.Offload():
                return offload_s
            case ir.Fetch():
                return fetch_s
            case ir.CommitStatistics() | ir.PostReceive():
                return nothing
            case ir.SendActivation() | ir.SendGradient():
                return nothing
            case ir.ReceiveActivation() | ir.ReceiveGradient():
                return nothing
            case _:
                assert_never(instruction)

    return seconds
