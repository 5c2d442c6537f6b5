"""What instructions cost, from a step that was traced."""

from collections import defaultdict
from statistics import median

from penstock.errors import ConfigError
from penstock.schedules import ir
from penstock.schedules.costs import Costs
from penstock.trace.timeline import Timeline

Times = dict[tuple[type[ir.Instruction], int], list[float]]
"""Seconds of each instruction of a kind on a stage."""


def measured_costs(timeline: Timeline) -> Costs:
    """Return what each kind of instruction took on each stage: the median over micro-batches.

        pipe.train_step(inputs, targets)  # a pipeline with trace=True
        costs = measured_costs(pipe.last_timeline)
        Pipeline(layers, num_stages=3, schedule=schedules.searched(costs))

    Backwards that ran in two parts give the costs of the parts, and the whole one is taken for
    their sum; of whole ones, each part is taken for half.  Where nothing was recomputed, that is
    taken to last as long as a forward.  A transfer is counted from the end of its send to that of
    its receive, and the shortest counts: the others waited for the rank that received.

    Raises:
        ConfigError: it is no timeline, or a stage ran no forward, or no backward.
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
    return Costs(
        forward_s=forwards,
        backward_s=tuple(wholes),
        recompute_s=tuple(map(median, again)),
        transfer_s=_transfers(timeline),
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


def _transfers(timeline: Timeline) -> dict[tuple[int, int], float]:
    """Return the seconds of each edge, the shortest of all its messages both ways."""
    sent_s = {
        span.instruction.message: span.end_s
        for span in timeline.spans
        if isinstance(span.instruction, ir.Send)
    }
    shortest: dict[tuple[int, int], float] = {}
    for span in timeline.spans:
        if isinstance(span.instruction, ir.Receive):
            message = span.instruction.message
            edge = (min(message[1:3]), max(message[1:3]))
            took_s = max(0.0, span.end_s - sent_s[message])
            shortest[edge] = min(took_s, shortest.get(edge, took_s))
    return shortest
