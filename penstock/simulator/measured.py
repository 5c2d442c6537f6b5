"""Costs of instructions and messages, from a traced step.

sender     ████ send_s
               ╲ transfer_s
waited ┄┄┄┄┄┄┄┄┄┄┄┄┄████ receive_s       its receive began before the send had ended
late   ▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒████         the message had arrived before: receive_s only
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from statistics import median
from typing import NamedTuple, TypeVar

from penstock.errors import ConfigError
from penstock.schedules import ir
from penstock.schedules.costs import Costs
from penstock.trace.timeline import Span, Timeline

Key = TypeVar("Key", int, tuple[int, int])


def measured_costs(timeline: Timeline) -> Costs:
    """Return the seconds of each kind of instruction on each stage: medians over micro-batches.

        pipe.train_step(inputs, targets)  # a pipeline with trace=True
        costs = measured_costs(pipe.last_timeline)
        Pipeline(layers, num_stages=3, schedule=schedules.searched(costs))

    Backwards in two parts give the costs of the parts, and their sum is the whole one.  Each part
    of a whole backward counts as half of it.  Without a recompute, one counts as a forward.  A
    message gives its transfer if its receive waited for it, and else the cost of the receive.

    Raises:
        ConfigError: it is no timeline, a stage ran no forward or no backward, or a rank is not
            in it.
    """
    if not isinstance(timeline, Timeline):
        raise ConfigError(
            f"measured_costs was given {timeline!r} instead of a timeline; pipe.last_timeline is "
            "one after a training step, if the pipeline was made with trace=True"
        )
    # 1. Sort the times by kind of instruction and stage.
    times: dict[tuple[type[ir.Instruction], int], list[float]] = defaultdict(list)
    for span in timeline.spans:
        times[type(span.instruction), span.instruction.stage].append(span.duration_s)

    def one(kind: type[ir.Instruction], stage: int) -> float:
        if not times[kind, stage]:
            raise ConfigError(
                f"the timeline has no {kind.__name__} of stage {stage}, so what one takes is not "
                "known; trace a whole training step, of all ranks"
            )
        return median(times[kind, stage])

    # 2. Take medians; derive the kinds that the step did not run.
    forwards, wholes, again, inputs, weights = [], [], [], [], []
    for stage in range(timeline.schedule.num_stages):
        forwards.append(one(ir.Forward, stage))
        again.append(median(times[ir.Recompute, stage] or [forwards[-1]]))
        if times[ir.BackwardInput, stage]:
            weights.append(one(ir.BackwardWeight, stage))
            inputs.append(median(times[ir.BackwardInput, stage]))
        else:
            inputs.append(one(ir.Backward, stage) / 2)
            weights.append(inputs[-1])
        wholes.append(median(times[ir.Backward, stage] or [inputs[-1] + weights[-1]]))
    send_s, receive_s, transfer_s = _message_costs(timeline)
    return Costs(
        forward_s=tuple(forwards),
        backward_s=tuple(wholes),
        recompute_s=tuple(again),
        backward_input_s=tuple(inputs),
        backward_weight_s=tuple(weights),
        send_s=send_s,
        receive_s=receive_s,
        transfer_s=transfer_s,
    )


class _Crossing(NamedTuple):
    """A message from one rank to another; `way` holds the stages that send and receive it."""

    way: tuple[int, int]
    send: Span
    receive: Span

    @property
    def edge(self) -> tuple[int, int]:
        return min(self.way), max(self.way)

    @property
    def took_s(self) -> float:
        """Seconds between the end of its send and the end of its receive."""
        return max(0, self.receive.end_s - self.send.end_s)

    @property
    def was_awaited(self) -> bool:
        """True if the receive began before the send had ended."""
        return self.receive.start_s <= self.send.end_s


def _message_costs(
    timeline: Timeline,
) -> tuple[tuple[float, ...], tuple[float, ...], dict[tuple[int, int], float]]:
    """Return seconds of sends and receives by stage, and of transfers by edge: medians.

    A stage whose receives all waited counts like the others.  So does an edge that stays on its
    rank.  An edge whose receives were all late has the time of its fastest message, or the others'
    time if that is less.
    """
    crossings = list(_crossings(timeline))

    # 1. Sends, and receives of messages that had arrived before.
    send_s = _each(median, ((c.way[0], c.send.duration_s) for c in crossings))
    awaited_s = _each(median, ((c.way, c.took_s) for c in crossings if c.was_awaited))
    late = (
        (crossing.way[1], crossing.receive.duration_s)
        for crossing in crossings
        if (took_s := awaited_s.get(crossing.way)) is not None
        and crossing.receive.start_s >= crossing.send.end_s + took_s
    )
    receive_s = _each(median, late)
    others_s = median(receive_s.values()) if receive_s else 0

    # 2. Transfers: the rest between the end of a send and the end of its receive.
    wires_s = [max(0, c.took_s - receive_s.get(c.way[1], others_s)) for c in crossings]
    on_edges = list(zip(crossings, wires_s, strict=True))
    least_s = _each(min, ((c.edge, wire_s) for c, wire_s in on_edges))
    of_awaited_s = _each(median, ((c.edge, wire_s) for c, wire_s in on_edges if c.was_awaited))
    known_s = (of_awaited_s or least_s).values()
    usual_s = median(known_s) if known_s else 0
    if of_awaited_s:
        least_s = {edge: min(wire_s, usual_s) for edge, wire_s in least_s.items()}
    transfer_s = least_s | of_awaited_s

    stages = range(timeline.schedule.num_stages)
    sends = (x for x in timeline.schedule.instructions if isinstance(x, ir.Send))
    edges = {(min(x.stage, x.peer), max(x.stage, x.peer)) for x in sends}
    return (
        tuple(send_s.get(stage, 0) for stage in stages),
        tuple(receive_s.get(stage, others_s) for stage in stages),
        {edge: transfer_s.get(edge, usual_s) for edge in edges},
    )


def _crossings(timeline: Timeline) -> Iterator[_Crossing]:
    sends = {
        s.instruction.message: s for s in timeline.spans if isinstance(s.instruction, ir.Send)
    }
    for span in timeline.spans:
        if isinstance(span.instruction, ir.Receive):
            send = sends.get(span.instruction.message)
            if send is None:
                raise ConfigError(
                    f"the timeline has no send for {span.instruction} on rank {span.rank}, so "
                    "what the message took is not known; trace a whole training step, of all ranks"
                )
            if send.rank != span.rank:
                yield _Crossing((send.instruction.stage, span.instruction.stage), send, span)


def _each(
    choose: Callable[[list[float]], float], times: Iterable[tuple[Key, float]]
) -> dict[Key, float]:
    collected: dict[Key, list[float]] = defaultdict(list)
    for key, seconds in times:
        collected[key].append(seconds)
    return {key: choose(values) for key, values in collected.items()}
