"""Foretell when each instruction of a schedule runs, from what each costs."""

from collections.abc import Callable, Iterable
from itertools import chain
from typing import assert_never

from penstock.schedules import ir
from penstock.schedules.collection import collection_paused
from penstock.schedules.costs import Costs, per_edge, per_stage
from penstock.schedules.passes import add_communication
from penstock.schedules.transfers import Transfers, chain_transfers
from penstock.schedules.walk import walk
from penstock.trace.timeline import Span, Timeline

Steps = Iterable[tuple[int, ir.Instruction]]
"""What is run, in order: (rank, instruction)."""


@collection_paused()
def simulate(  # noqa: C901, PLR0912, PLR0915 - one flat match
    schedule: ir.Schedule,
    costs: Costs,
    watch: Callable[[Steps, int], Steps] | None = None,
    *,
    transfers: Transfers | None = None,
) -> Timeline:
    """Price `schedule`: each rank runs its program in order and starts each instruction when free.

    A send takes no time; its message arrives `transfer_s` later (at once on the same rank), and a
    receive ends no earlier.
    Where the schedule has no communication yet, it is added for `transfers`; without these, for a
    chain in which every stage feeds the next.
    The step begins at 0 seconds; exact costs (ints, Fractions) give exact times.  `watch` is given
    the steps and their number, and yields them on, to show how far it is.

    Raises:
        ConfigError: `costs` lacks a stage or an edge of the schedule.
        ScheduleError: ranks would wait for each other for ever.
    """
    schedule = _with_communication(schedule, transfers)
    num_stages = schedule.num_stages
    forward_s = per_stage(costs.forward_s, num_stages, "forward_s")
    backward_s = per_stage(costs.backward_s, num_stages, "backward_s")
    input_s, weight_s = costs.parts(num_stages)
    recompute_s = per_stage(costs.recompute_s, num_stages, "recompute_s")
    reduce_s = per_stage(costs.reduce_s, num_stages, "reduce_s")
    transfer_s, ranks = per_edge(costs.transfer_s), schedule.ranks
    arrival_s: dict[ir.Message, float] = {}
    free_s: list[float] = [0] * schedule.num_ranks
    spans: list[list[Span]] = [[] for _ in schedule.programs]
    steps: Steps = walk(schedule)
    if watch is not None:
        steps = watch(steps, sum(map(len, schedule.programs)))
    for rank, instruction in steps:
        start = end = free_s[rank]
        match instruction:
            case ir.SendActivation() | ir.SendGradient():
                stage, peer = instruction.stage, instruction.peer
                wire_s = 0 if ranks[peer] == rank else transfer_s(stage, peer)
                arrival_s[instruction.message] = start + wire_s
            case ir.ReceiveActivation() | ir.ReceiveGradient():
                end = max(start, arrival_s.pop(instruction.message))
            case ir.Forward():
                end = start + forward_s[instruction.stage]
            case ir.Recompute():
                end = start + recompute_s[instruction.stage]
            case ir.Backward():
                end = start + backward_s[instruction.stage]
            case ir.BackwardInput():
                end = start + input_s[instruction.stage]
            case ir.BackwardWeight():
                end = start + weight_s[instruction.stage]
            case ir.CommitStatistics() | ir.PostReceive():
                pass
            case ir.ReduceGradients():
                end = start + reduce_s[instruction.stage]
            case _:
                assert_never(instruction)
        free_s[rank] = end
        spans[rank].append(Span(rank, instruction, start, end))
    return Timeline(tuple(chain.from_iterable(spans)))


def _with_communication(schedule: ir.Schedule, transfers: Transfers | None) -> ir.Schedule:
    if any(isinstance(instruction, ir.Communication) for instruction in schedule.instructions):
        return schedule
    if transfers is None:
        transfers = chain_transfers(schedule.num_stages)
    return add_communication(schedule, transfers)
