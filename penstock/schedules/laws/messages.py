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
            for peer, lane in lanes.by_peer(send, stage).items():
                sent[stage, peer] = lane.microbatches
            for peer, lane in lanes.by_peer(receive, stage).items():
                received[peer, stage] = lane.microbatches
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
            lanes.by_peer(send, source)[target].positions[0],
            f"stage {consumer} uses nothing of stage {producer}: there is no such transfer",
        )
