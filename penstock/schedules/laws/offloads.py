"""Law: what is moved away comes back, once, before it is needed."""

from penstock.schedules import ir

from .lanes import Lanes

_NOTHING_KEPT = "there is nothing to move away: its Forward has not run, or its backward has"
_TWICE = "it is moved away twice"
_NOT_AWAY = "there is nothing to bring back: no Offload of it stands before"
_STAYS_AWAY = "what it needs was moved away and no Fetch has brought it back"


def offloads(lanes: Lanes) -> None:
    """Check that an Offload follows its Forward, and one Fetch stands between it and the first
    instruction that needs what was moved away.
    """
    for stage in range(lanes.num_stages):
        fetches = list(lanes.each(stage, ir.Fetch))
        offloaded = list(lanes.each(stage, ir.Offload))
        if fetches or offloaded:
            _check(lanes, stage, offloaded, fetches)


def _check(
    lanes: Lanes,
    stage: int,
    offloaded: list[tuple[int, ir.Offload]],
    fetches: list[tuple[int, ir.Fetch]],
) -> None:
    forwards = lanes.computes(stage, ir.Forward)
    needs = {
        **lanes.computes(stage, *ir.GIVES_GRADIENTS),
        **lanes.computes(stage, ir.Recompute),  # before the backward: `recomputes` holds
    }
    away: dict[int, int] = {}
    for position, x in offloaded:
        i = x.microbatch
        if i in away:
            raise lanes.fault(stage, position, _TWICE)
        if not forwards.get(i, position) < position < needs.get(i, position):
            raise lanes.fault(stage, position, _NOTHING_KEPT)
        away[i] = position
    back: dict[int, int] = {}
    for position, y in fetches:
        i = y.microbatch
        if i in back or away.get(i, position) >= position:
            raise lanes.fault(stage, position, _NOT_AWAY)
        back[i] = position
    for i in away:
        if back.get(i, needs[i]) >= needs[i]:
            raise lanes.fault(stage, needs[i], _STAYS_AWAY)
