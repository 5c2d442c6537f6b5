"""Law: whatever an instruction needs stands before it."""

from penstock.schedules import ir

from .lanes import Lanes

Places = dict[int, int]
"""Where the instruction of each micro-batch stands."""


def operands(lanes: Lanes) -> None:
    """Check that values are received before they are used, and computed before they are sent."""
    for stage in range(lanes.num_stages):
        forwards = lanes.computes(stage, ir.Forward)
        backwards = lanes.computes(stage, *ir.GIVES_GRADIENTS)
        for i, position in backwards.items():
            if position < forwards[i]:
                raise lanes.fault(stage, position, "its Forward has not run")
        for i, position in lanes.computes(stage, ir.BackwardWeight).items():
            if position < backwards[i]:
                raise lanes.fault(stage, position, "its BackwardInput has not run")
        for peer in lanes.producers.get(stage, ()):
            _check_received(lanes, ir.ReceiveActivation, stage, peer, forwards)
            _check_computed(lanes, ir.SendGradient, stage, peer, backwards)
        for peer in lanes.consumers.get(stage, ()):
            _check_received(lanes, ir.ReceiveGradient, stage, peer, backwards)
            _check_computed(lanes, ir.SendActivation, stage, peer, forwards)


def _check_received(
    lanes: Lanes, kind: type[ir.Receive], stage: int, peer: int, uses: Places
) -> None:
    received = lanes.messages(kind, stage, peer)
    for i, position in uses.items():
        if received.get(i, position) >= position:
            raise lanes.fault(stage, position, f"{kind(stage, i, peer)} must come before it")


def _check_computed(
    lanes: Lanes, kind: type[ir.Send], stage: int, peer: int, computed: Places
) -> None:
    name = "Backward" if kind.gradient else "Forward"
    for i, position in lanes.messages(kind, stage, peer).items():
        if computed[i] > position:
            raise lanes.fault(stage, position, f"its {name} must come before it")
