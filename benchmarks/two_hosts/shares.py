"""Where a step's time goes: compute, bubble, communication; and what the simulator predicts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from penstock.schedules import ir
from penstock.simulator import Costs, simulate


@dataclass(frozen=True, slots=True)
class Computed:
    """Seconds of one stage's forwards, recomputes and backwards in a step."""

    forward_s: float
    recompute_s: float
    backward_s: float

    @property
    def total_s(self) -> float:
        return self.forward_s + self.recompute_s + self.backward_s


@dataclass(frozen=True, slots=True)
class Shares:
    """Shares of the ranks' time in a step; they add up to 1."""

    compute: float
    communication: float
    bubble: float


def costs_of(schedule: ir.Schedule, computed: Sequence[Computed]) -> Costs:
    """Share out each stage's seconds over its instructions; messages take no time."""

    def each(kind: type[ir.Instruction], total_s: list[float]) -> tuple[float, ...]:
        numbers = [
            sum(isinstance(i, kind) and i.stage == stage for _, i in schedule)
            for stage in range(schedule.num_stages)
        ]
        return tuple(s / n if n else 0.0 for s, n in zip(total_s, numbers, strict=True))

    return Costs(
        forward_s=each(ir.Forward, [c.forward_s for c in computed]),
        recompute_s=each(ir.Recompute, [c.recompute_s for c in computed]),
        backward_s=each(ir.Backward, [c.backward_s for c in computed]),
    )


def shares(schedule: ir.Schedule, computed: Sequence[Computed], step_s: float) -> Shares:
    """Split a measured step.

    compute         the mean over the ranks of the time in which layers ran
    bubble          what the same schedule leaves idle with the same compute times and messages
                    that take no time: the simulator's step less the compute
    communication   the rest: how much longer the step took than that
    """
    free_s = simulate(schedule, costs_of(schedule, computed)).step_s
    compute_s = sum(c.total_s for c in computed) / len(computed)
    return Shares(compute_s / step_s, (step_s - free_s) / step_s, (free_s - compute_s) / step_s)


def predicted_s(
    schedule: ir.Schedule, computed: Sequence[Computed], message_s: float, latency_s: float
) -> float:
    """Simulate a step with messages that do not wait for each other on the link, in seconds."""
    costs = replace(costs_of(schedule, computed), transfer_s=message_s + latency_s)
    return simulate(schedule, costs).step_s


def predicted_in_turn_s(
    schedule: ir.Schedule, computed: Sequence[Computed], message_s: float, latency_s: float
) -> float:
    """Simulate a step over a link that carries one message at a time in each direction."""
    costs = costs_of(schedule, computed)
    there, back = schedule.num_stages, schedule.num_stages + 1

    def extended(of_stages: object, *of_links: float) -> tuple[float, ...]:
        assert isinstance(of_stages, tuple)
        return (*of_stages, *of_links)

    with_links = Costs(
        forward_s=extended(costs.forward_s, message_s, 0.0),
        recompute_s=extended(costs.recompute_s, 0.0, 0.0),
        backward_s=extended(costs.backward_s, 0.0, message_s),
        transfer_s={(0, there): 0.0, (1, there): latency_s, (1, back): 0.0, (0, back): latency_s},
    )
    return simulate(link_as_ranks(schedule), with_links).step_s


def link_as_ranks(schedule: ir.Schedule) -> ir.Schedule:
    """Make each direction of the link between two stages a rank, whose work is to carry messages.

    rank 0 | 0F0 0F0>1 ... 0B0<1 0B0      ->      rank 0 | 0F0 0F0>2 ... 0B0<3 0B0
    rank 1 | 1F0<0 1F0 1B0 1B0>0                  rank 1 | 1F0<2 1F0 1B0 1B0>3
                                                  rank 2 | 2F0<0 2F0 2F0>1
                                                  rank 3 | 3B0<1 3B0 3B0>0
    """
    there, back = schedule.num_stages, schedule.num_stages + 1
    stages = tuple(
        tuple(_over_link(instruction, there, back) for instruction in program)
        for program in schedule.programs
    )
    carried = list(_carried(schedule, there, back))
    links = (tuple(i for i in carried if i.stage == number) for number in (there, back))
    return ir.Schedule((*stages, *links))


def _over_link(instruction: ir.Instruction, there: int, back: int) -> ir.Instruction:
    """Send to the link, and receive from it, instead of from the other stage."""
    match instruction:
        case ir.SendActivation() | ir.ReceiveActivation():
            return replace(instruction, peer=there)
        case ir.SendGradient() | ir.ReceiveGradient():
            return replace(instruction, peer=back)
        case ir.PostReceive():
            return replace(instruction, peer=back if instruction.gradient else there)
        case _:
            return instruction


def _carried(schedule: ir.Schedule, there: int, back: int) -> Iterator[ir.Instruction]:
    """Yield what the link does: messages go in the order in which they are sent."""
    for _, x in schedule:
        match x:
            case ir.SendActivation(s, i, peer):
                yield from (ir.ReceiveActivation(there, i, s), ir.Forward(there, i))
                yield ir.SendActivation(there, i, peer)
            case ir.SendGradient(s, i, peer):
                yield from (ir.ReceiveGradient(back, i, s), ir.Backward(back, i))
                yield ir.SendGradient(back, i, peer)
            case _:
                pass
