"""What stages take, from traced steps: for the simulator to predict other schedules from."""

from dataclasses import replace

from torch import Tensor

from penstock import Pipeline, schedules
from penstock.schedules import Family
from penstock.schedules.costs import Costs
from penstock.simulator import measured_costs
from penstock.trace import Timeline

STEPS = 5
"""Traced steps; the costs are those of the median one."""

WHOLE_AND_DIVIDED: dict[int, tuple[Family, Family]] = {
    1: (schedules.one_f_one_b, schedules.zb_h1()),
    2: (schedules.interleaved_1f1b(stages_per_rank=2), schedules.zb_v()),
}
"""For so many stages on a rank, a schedule of whole backwards and one of divided ones."""


Batch = tuple[Tensor, Tensor]
"""Inputs and targets."""


def traced_costs(whole: Pipeline, divided: Pipeline, batch: Batch) -> Costs:
    """Measure whole and divided backwards in turn: what slows the machine slows both."""
    rounds = [[_timeline(pipe, batch) for pipe in (whole, divided)] for _ in range(2 + STEPS)]
    of_whole, of_parts = (
        measured_costs(sorted(timelines, key=lambda timeline: timeline.step_s)[STEPS // 2])
        for timelines in zip(*rounds[2:], strict=True)
    )
    return replace(of_parts, backward_s=of_whole.backward_s, forward_s=of_whole.forward_s)


def _timeline(pipe: Pipeline, batch: Batch) -> Timeline:
    pipe.train_step(*batch)
    assert pipe.last_timeline is not None
    return pipe.last_timeline
