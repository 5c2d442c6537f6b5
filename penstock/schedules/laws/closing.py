"""Laws of what closes a stage's forwards or backwards: it comes once, after the last of them."""

from penstock.schedules import ir

from .lanes import Lanes


def commits(lanes: Lanes) -> None:
    """Check that statistics are committed at most once, after the last Forward."""
    too_late = "a forward runs after the statistics of its stage were committed"
    twice = "its statistics are committed twice"
    _check_last(lanes, (twice, too_late), ir.CommitStatistics, ir.Forward)


def reductions(lanes: Lanes) -> None:
    """Check that gradients are added up over replicas at most once, after the last Backward."""
    too_late = "a backward runs after the gradients of its stage were added up over replicas"
    twice = "its gradients are added up twice"
    _check_last(lanes, (twice, too_late), ir.ReduceGradients, *ir.ADDS_GRADIENTS)


def _check_last(
    lanes: Lanes,
    problems: tuple[str, str],
    closes: type[ir.Instruction],
    *closed: type[ir.Compute],
) -> None:
    twice, too_late = problems
    for stage in range(lanes.num_stages):
        closing, before = lanes.positions(stage, closes), lanes.positions(stage, *closed)
        if len(closing) > 1:
            raise lanes.fault(stage, closing[1], twice)
        if closing and before and before[-1] > closing[0]:
            late = next(position for position in before if position > closing[0])
            raise lanes.fault(stage, late, too_late)
