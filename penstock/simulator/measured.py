"""What instructions cost, from a step that was traced."""

from collections import defaultdict
from statistics import median

from penstock.errors import ConfigError
from penstock.schedules import ir
from penstock.schedules.costs import Costs
from penstock.trace.timeline import Timeline

from .measured_messages import message_costs

Times = dict[tuple[type[ir.Instruction], int], list[float]]
"""Seconds of each instruction of a kind on a stage."""


def measured_costs(timeline: Timeline) -> Costs:
    """Return what each kind of instruction took on each stage: the median over micro-batches.

        pipe.train_step(inputs, targets)  # a pipeline with trace=True
        costs = measured_costs(pipe.last_timeline)
        Pipeline(layers, num_stages=3, schedule=schedules.searched(costs))

    Backwards that ran in two parts give the costs of the parts, and the whole one is taken for
    their sum; of whole ones, each part is taken for half.  Where nothing was recomputed, that is
    taken to last as long as a forward.  Of messages between ranks a transfer is counted where the
    receive was waiting for it, and what a receive itself takes where the message lay there.

    Raises:
        ConfigError: it is no timeline, a stage ran no forward or no backward, or a rank is not
            in it.
    """
    if not isinstance(timeline, Timeline):
        raise ConfigError(
            f"measured_costs was given {timeline!r} instead of a timeline; pipe.last_timeline is "
            "one after a training step, if the pipeline was made with trace=True"
        )
    times: Times = defaultdict(list)
    for span in timeline.spans:
        times[type(span.instruction), span.instruction.stage].append(span.duration_s)
    stages = range(timeline.schedule.num_stages)
    forwards = tuple(_one(times, ir.Forward, stage) for stage in stages)
    parts = tuple(_parts(times, stage) for stage in stages)
    wholes = (
        median(times[ir.Backward, stage]) if times[ir.Backward, stage] else sum(parts[stage])
        for stage in stages
    )
    again = (times[ir.Recompute, stage] or [forwards[stage]] for stage in stages)
    messages = message_costs(timeline)
    return Costs(
        forward_s=forwards,
        backward_s=tuple(wholes),
        recompute_s=tuple(map(median, again)),
        transfer_s=messages.transfer_s,
        send_s=messages.send_s,
        receive_s=messages.receive_s,
        backward_input_s=tuple(of_inputs for of_inputs, _ in parts),
        backward_weight_s=tuple(of_weights for _, of_weights in parts),
    )


def _one(times: Times, kind: type[ir.Instruction], stage: int) -> float:
    if not times[kind, stage]:
        raise ConfigError(
            f"the timeline has no {kind.__name__} of stage {stage}, so what one takes is not "
            "known; trace a whole training step, of all ranks"
        )
    return median(times[kind, stage])


def _parts(times: Times, stage: int) -> tuple[float, float]:
    """Return what the two parts of a backward take."""
    if times[ir.BackwardInput, stage]:
        of_weights = _one(times, ir.BackwardWeight, stage)
        return median(times[ir.BackwardInput, stage]), of_weights
    half = _one(times, ir.Backward, stage) / 2
    return half, half
