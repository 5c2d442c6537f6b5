"""Laws of what closes a stage's forwards or backwards: it comes once, after the last of them."""

from penstock.schedules import ir

from .lanes import Lanes


def commits(lanes: Lanes) -> None:
    """Check that statistics are committed at most once, after the last Forward."""
    kinds, twice = (ir.CommitStatistics, ir.Forward), "its statistics are committed twice"
    too_late = "a forward runs after the statistics of its stage were committed"
    _check_last(lanes, kinds, twice, too_late)


def reductions(lanes: Lanes) -> None:
    """Check that gradients are added up over replicas at most once, after the last Backward."""
    kinds, twice = (ir.ReduceGradients, ir.Backward), "its gradients are added up twice"
    too_late = "a backward runs after the gradients of its stage were added up over replicas"
    _check_last(lanes, kinds, twice, too_late)


def _check_last(
    lanes: Lanes,
    kinds: tuple[type[ir.Instruction], type[ir.Instruction]],
    twice: str,
    too_late: str,
) -> None:
    for stage in range(lanes.num_stages):
        closing, closed = (lanes.positions(kind, stage) for kind in kinds)
        if len(closing) > 1:
            raise lanes.fault(stage, closing[1], twice)
        if closing and closed and closed[-1] > closing[0]:
            late = next(position for position in closed if position > closing[0])
            raise lanes.fault(stage, late, too_late)
