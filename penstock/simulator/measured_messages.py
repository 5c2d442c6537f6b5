"""What messages between ranks cost, from a step that was traced.

sender     ████ send_s
               ╲ transfer_s
waited ┄┄┄┄┄┄┄┄┄┄┄┄┄████ receive_s       its receive began before the send had ended
late   ▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒████         the message lay there already: receive_s, and no more
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from statistics import median
from typing import NamedTuple, TypeVar

from penstock.errors import ConfigError
from penstock.schedules import ir
from penstock.trace.timeline import Span, Timeline

Key = TypeVar("Key", int, tuple[int, int])


class MessageCosts(NamedTuple):
    """Seconds of sends and receives on each stage, and between the two on each edge."""

    send_s: tuple[float, ...]
    receive_s: tuple[float, ...]
    transfer_s: dict[tuple[int, int], float]


class _Crossing(NamedTuple):
    """A message from one rank to another; `way` are the stages that send and receive it."""

    way: tuple[int, int]
    send: Span
    receive: Span

    @property
    def edge(self) -> tuple[int, int]:
        """Both stages, the lower one first."""
        return min(self.way), max(self.way)

    @property
    def took_s(self) -> float:
        """What it took from the end of its send to that of its receive."""
        return max(0, self.receive.end_s - self.send.end_s)

    @property
    def was_awaited(self) -> bool:
        """Whether the receive began before the send had ended."""
        return self.receive.start_s <= self.send.end_s


def message_costs(timeline: Timeline) -> MessageCosts:
    """Return the medians over messages from one rank to another.

    A stage whose receives all waited is taken for the others', and so is an edge that stays on its
    rank; an edge whose receives were all late, for the message that took least, or for the others
    where those took less.

    Raises:
        ConfigError: a rank that sends or receives is not in the timeline.
    """
    crossings = list(_crossings(timeline))
    stages = range(timeline.schedule.num_stages)
    awaited_s = _each(median, ((c.way, c.took_s) for c in crossings if c.was_awaited))
    send_s = _each(median, ((c.way[0], c.send.duration_s) for c in crossings))
    late = (
        (crossing.way[1], crossing.receive.duration_s)
        for crossing in crossings
        if (took_s := awaited_s.get(crossing.way)) is not None
        and crossing.receive.start_s >= crossing.send.end_s + took_s
    )
    receive_s = _each(median, late)
    others_s = median(receive_s.values()) if receive_s else 0
    wires_s = [max(0, c.took_s - receive_s.get(c.way[1], others_s)) for c in crossings]
    on_edges = list(zip(crossings, wires_s, strict=True))
    least_s = _each(min, ((c.edge, wire_s) for c, wire_s in on_edges))
    of_awaited_s = _each(median, ((c.edge, wire_s) for c, wire_s in on_edges if c.was_awaited))
    known_s = (of_awaited_s or least_s).values()
    usual_s = median(known_s) if known_s else 0
    if of_awaited_s:
        least_s = {edge: min(wire_s, usual_s) for edge, wire_s in least_s.items()}
    transfer_s = least_s | of_awaited_s
    return MessageCosts(
        tuple(send_s.get(stage, 0) for stage in stages),
        tuple(receive_s.get(stage, others_s) for stage in stages),
        {edge: transfer_s.get(edge, usual_s) for edge in _edges(timeline)},
    )


def _edges(timeline: Timeline) -> set[tuple[int, int]]:
    sends = (x for x in timeline.schedule.instructions if isinstance(x, ir.Send))
    return {(min(x.stage, x.peer), max(x.stage, x.peer)) for x in sends}


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
    """Choose one of the times of each key."""
    collected: dict[Key, list[float]] = defaultdict(list)
    for key, seconds in times:
        collected[key].append(seconds)
    return {key: choose(found) for key, found in collected.items()}
