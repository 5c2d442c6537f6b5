"""Law: what is sent is received, once, in the same order, and only where something is to cross."""

from collections import defaultdict

from penstock.errors import ScheduleError
from penstock.schedules import ir

from .lanes import Lanes

_PAIRS: tuple[tuple[type[ir.Send], type[ir.Receive], str], ...] = (
    (ir.SendActivation, ir.ReceiveActivation, "activations"),
    (ir.SendGradient, ir.ReceiveGradient, "gradients"),
)


def messages(lanes: Lanes) -> None:
    """Check that both ends of each transfer name the same micro-batches in the same order."""
    for send, receive, what in _PAIRS:
        sent: dict[tuple[int, int], list[int]] = defaultdict(list)
        received: dict[tuple[int, int], list[int]] = defaultdict(list)
        for stage in range(lanes.num_stages):
            for _, x in lanes.each(stage, send):
                sent[stage, x.peer].append(x.microbatch)
            for _, y in lanes.each(stage, receive):
                received[y.peer, stage].append(y.microbatch)
        for source, target in sorted(sent.keys() | received.keys()):
            there, here = sent[source, target], received[source, target]
            if there != here or len(set(there)) < len(there):
                raise ScheduleError(
                    f"stage {source} sends {what} of micro-batches {there} to stage {target}, "
                    f"which receives {here}; both must name the same micro-batches in the same "
                    f"order, each once.\n{lanes.schedule}"
                )
            _check_transfer(lanes, send, source, target)


def _check_transfer(lanes: Lanes, send: type[ir.Send], source: int, target: int) -> None:
    producer, consumer = (target, source) if send.gradient else (source, target)
    if consumer not in lanes.consumers.get(producer, ()):
        raise lanes.fault(
            source,
            next(iter(lanes.messages(send, source, target).values())),
            f"stage {consumer} uses nothing of stage {producer}: there is no such transfer",
        )
