"""Law: room is made for a message once, before it is received."""

from penstock.schedules import ir

from .lanes import Lanes


def posts(lanes: Lanes) -> None:
    """Check that each PostReceive stands once, before the receive of its message."""
    kinds: tuple[type[ir.Receive], ...] = (ir.ReceiveActivation, ir.ReceiveGradient)
    for stage in range(lanes.num_stages):
        if not lanes.positions(stage, ir.PostReceive):
            continue
        received = {
            x.message: position for kind in kinds for position, x in lanes.each(stage, kind)
        }
        seen: set[ir.Message] = set()
        for position, post in lanes.each(stage, ir.PostReceive):
            if post.message in seen:
                raise lanes.fault(stage, position, "it is posted twice")
            seen.add(post.message)
            if received.get(post.message, position) < position:
                raise lanes.fault(stage, position, "its receive stands before it")
