"""Law: a graph that was dropped is built again, once, before it is needed."""

from penstock.schedules import ir

from .lanes import Lanes

_NOTHING = "there is nothing to recompute: its Forward kept its graph or has not run"
_DROPPED = "its Forward dropped its graph and no Recompute has rebuilt it"


def recomputes(lanes: Lanes) -> None:
    """Check that a Recompute stands between a Forward that dropped its graph and its Backward."""
    for stage in range(lanes.num_stages):
        forwards = lanes.each(stage, ir.Forward)
        dropped = {x.microbatch: position for position, x in forwards if not x.keep_graph}
        rebuilt: dict[int, int] = {}
        for position, x in lanes.each(stage, ir.Recompute):
            i = x.microbatch
            if i in rebuilt or dropped.get(i, position) >= position:
                raise lanes.fault(stage, position, _NOTHING)
            rebuilt[i] = position
        backwards = lanes.computes(stage, *ir.GIVES_GRADIENTS) if dropped else {}
        for i in dropped:
            if rebuilt.get(i, backwards[i]) >= backwards[i]:
                raise lanes.fault(stage, backwards[i], _DROPPED)
