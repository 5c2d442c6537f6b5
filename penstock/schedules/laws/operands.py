"""Law: whatever an instruction needs stands before it."""

from penstock.schedules import ir

from .lanes import Lanes, Places, first_too_early


def operands(lanes: Lanes) -> None:
    """Check that values are received before they are used, and computed before they are sent."""
    for stage in range(lanes.num_stages):
        forwards = lanes.computes(stage, ir.Forward)
        backwards = lanes.computes(stage, *ir.GIVES_GRADIENTS)
        weights = lanes.computes(stage, ir.BackwardWeight)
        _check(lanes, stage, backwards, forwards, "its Forward has not run")
        _check(lanes, stage, weights, backwards, "its BackwardInput has not run")
        for peer in lanes.producers.get(stage, ()):
            _check_received(lanes, ir.ReceiveActivation, stage, peer, forwards)
            _check_computed(lanes, ir.SendGradient, stage, peer, backwards)
        for peer in lanes.consumers.get(stage, ()):
            _check_received(lanes, ir.ReceiveGradient, stage, peer, backwards)
            _check_computed(lanes, ir.SendActivation, stage, peer, forwards)


def _check(lanes: Lanes, stage: int, uses: Places, needed: Places, problem: str) -> None:
    i = first_too_early(uses, needed)
    if i is not None:
        raise lanes.fault(stage, uses[i], problem)


def _check_received(
    lanes: Lanes, kind: type[ir.Receive], stage: int, peer: int, uses: Places
) -> None:
    i = first_too_early(uses, lanes.messages(kind, stage, peer))
    if i is not None:
        raise lanes.fault(stage, uses[i], f"{kind(stage, i, peer)} must come before it")


def _check_computed(
    lanes: Lanes, kind: type[ir.Send], stage: int, peer: int, computed: Places
) -> None:
    name = "Backward" if kind.gradient else "Forward"
    sent = lanes.messages(kind, stage, peer)
    _check(lanes, stage, sent, computed, f"its {name} must come before it")
