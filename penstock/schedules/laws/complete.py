"""Law: nothing is left out and nothing is done twice."""

from collections import Counter

from penstock.errors import ScheduleError
from penstock.schedules import ir

from .lanes import Lanes


def complete(lanes: Lanes) -> None:
    """Check that every stage has one Forward and one Backward for every micro-batch, or in its
    place a BackwardInput and a BackwardWeight.
    """
    every = list(range(lanes.num_microbatches))
    for stage in range(lanes.num_stages):
        found = [sorted(lanes.microbatches(stage, kind)) for kind in _KINDS]
        forwards, whole, inputs, weights = found
        if forwards == every and inputs == weights and sorted(whole + inputs) == every:
            continue
        times = dict(zip(_KINDS, map(Counter, found), strict=True))
        for i in range(lanes.num_microbatches):
            numbers = tuple(times[kind][i] for kind in _KINDS)
            if numbers in _RIGHT:
                continue
            right = _RIGHT[numbers[1] == 0 and numbers[2] > 0]
            of_each = zip(_KINDS, numbers, right, strict=True)
            kind, number, wanted = next(x for x in of_each if x[1] != x[2])
            problem = (
                f"stage {stage} has {number} {kind.__name__} instructions for micro-batch {i}; it "
                f"needs exactly {'one' if wanted else 'none'}"
            )
            others = [place for place, x in lanes.each(stage, *_KINDS) if x.microbatch == i]
            if others:
                raise lanes.fault(stage, others[-1], problem)
            raise ScheduleError(f"{problem}.\n{lanes.schedule}")


_KINDS: tuple[type[ir.Compute], ...] = (
    ir.Forward,
    ir.Backward,
    ir.BackwardInput,
    ir.BackwardWeight,
)
_RIGHT = ((1, 1, 0, 0), (1, 0, 1, 1))
"""How often each of them may come: with a backward in one part, and in two."""
