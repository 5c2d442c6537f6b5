"""The table of a plan's stages: a row for each, with what was predicted of it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import TYPE_CHECKING

from penstock.trace.units import bytes_text, time_text

if TYPE_CHECKING:
    from .plan import Plan


@dataclass(frozen=True, slots=True)
class PredictedStage:
    """What a planner predicted of a stage on a mesh, for a micro-batch.

    `handover_s` are the seconds of what goes on to the next stage, of `sent_bytes`, and of what
    comes back.  Each device has `state_bytes` of weights, gradients and optimizer state, and keeps
    at most `kept_bytes` of activations.  Where several stages follow each other on a mesh, as
    segments do, nothing is sent between them, and the bytes of all of them add up.
    """

    forward_s: float
    backward_s: float
    handover_s: float
    state_bytes: int
    kept_bytes: int
    sent_bytes: int


MESH_HEADS = (
    *("stage", "layers", "parameters", "mesh", "devices", "forward", "backward", "handover"),
    *("weights etc.", "activations", "to the next"),
)
_HEADS = ("stage", "layers", "parameters", "recompute", "ranks", "device", "micro-batch")


def stage_rows(plan: "Plan") -> Iterator[Sequence[str]]:
    """Yield the heads of the table, then the row of each stage; on meshes that of each mesh."""
    predicted, ends = plan.predicted_stages, [*accumulate(plan.partition, initial=0)]
    yield _HEADS if predicted is None else MESH_HEADS
    every = [range(n, n + 1) for n in range(plan.num_stages)]
    for stages in every if predicted is None else segments_of(plan):
        own = plan.layers[ends[stages[0]] : ends[stages[-1] + 1]]
        layers = f"{len(own)}: {span_text([layer.name for layer in own])}"
        first = stages_text(stages), layers, f"{sum(layer.num_parameters for layer in own):,}"
        if predicted is None:
            yield (*first, *_usual_cells(plan, stages[0]))
        else:
            yield (*first, *_mesh_cells(plan, stages[0], [predicted[n] for n in stages]))


def segments_of(plan: "Plan") -> Iterator[range]:
    """Yield the stages that follow each other on one mesh: several where they are segments."""
    for _, own in groupby(range(plan.num_stages), key=plan.placement.ranks.__getitem__):
        stages = [*own]
        yield range(stages[0], stages[-1] + 1)


def stages_text(stages: range) -> str:
    """Write the numbers of consecutive stages."""
    return "-".join(str(n) for n in dict.fromkeys((stages[0], stages[-1])))


def span_text(names: Sequence[str]) -> str:
    """Name consecutive layers by the first and the last."""
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"


def _usual_cells(plan: "Plan", stage: int) -> Iterator[str]:
    yield plan.recompute[stage].value + (", offload" if plan.offload[stage] else "")
    yield " ".join(str(rank) for row in plan.placement.ranks[stage] for rank in row)
    yield plan.placement.devices[stage]
    yield "?" if plan.predicted_s is None else time_text(plan.predicted_s[stage])


def _mesh_cells(plan: "Plan", stage: int, segments: Sequence[PredictedStage]) -> Iterator[str]:
    last = segments[-1]
    yield mesh_text(plan, stage)
    yield devices_text(plan, stage)
    yield time_text(sum(own.forward_s for own in segments))
    yield time_text(sum(own.backward_s for own in segments))
    yield time_text(last.handover_s) if last.handover_s else "-"
    yield bytes_text(sum(own.state_bytes for own in segments))
    yield bytes_text(sum(own.kept_bytes for own in segments))
    yield bytes_text(last.sent_bytes) if last.sent_bytes else "-"


def mesh_text(plan: "Plan", stage: int) -> str:
    """Write the lengths of the axes of a stage's mesh."""
    return " x ".join(map(str, plan.placement.shard_axes_of(stage)))


def devices_text(plan: "Plan", stage: int) -> str:
    """Write the numbers of a stage's devices, and the hosts that these are in."""
    ranks = plan.placement.ranks[stage][0]
    devices = plan.devices_of(stage) or ranks
    is_row = devices == tuple(range(devices[0], devices[-1] + 1)) and len(devices) > 1
    text = f"{devices[0]}-{devices[-1]}" if is_row else " ".join(map(str, devices))
    if plan.cluster is None:
        return text
    hosts = dict.fromkeys(plan.cluster.places[n].host_name for n in devices)
    return f"{text} of {span_text([*hosts])}"
