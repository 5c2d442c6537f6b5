"""Law: nothing is left out and nothing is done twice."""

from collections import Counter

from penstock.errors import ScheduleError
from penstock.schedules import ir

from .lanes import Lanes


def complete(lanes: Lanes) -> None:
    """Check that every stage has one Forward and one Backward for every micro-batch."""
    expected = range(lanes.num_microbatches)
    kinds: tuple[type[ir.Forward | ir.Backward], ...] = (ir.Forward, ir.Backward)
    for kind in kinds:
        for stage in range(lanes.num_stages):
            times = Counter(x.microbatch for _, x in lanes.each(kind, stage))
            if wrong := [i for i in expected if times[i] != 1]:
                raise ScheduleError(
                    f"stage {stage} has {times[wrong[0]]} {kind.__name__} instructions for "
                    f"micro-batch {wrong[0]}; it needs exactly one.\n{lanes.schedule}"
                )
