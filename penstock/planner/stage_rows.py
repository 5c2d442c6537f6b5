"""The table of a plan's stages: a row for each, with its predicted figures."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import TYPE_CHECKING

from penstock.trace.units import bytes_text, time_text

if TYPE_CHECKING:
    from .plan import Plan


@dataclass(frozen=True, slots=True)
class PredictedStage:
    """The predicted figures of a stage on a mesh, for one micro-batch.

    `handover_s` are the seconds to send `sent_bytes` to the next stage and to receive their
    gradients.  Each device has `state_bytes` of weights, gradients and optimizer state, and at
    most `kept_bytes` of activations.  Segments, consecutive stages on one mesh, send nothing to
    each other, and their bytes add up.
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
    """Yield the heads of the table, then a row for each stage, or for each mesh."""
    predicted, ends = plan.predicted_stages, [*accumulate(plan.partition, initial=0)]
    yield _HEADS if predicted is None else MESH_HEADS
    single = [range(n, n + 1) for n in range(plan.num_stages)]
    for stages in single if predicted is None else segments_of(plan):
        layers_here = plan.layers[ends[stages[0]] : ends[stages[-1] + 1]]
        layers = f"{len(layers_here)}: {span_text([layer.name for layer in layers_here])}"
        num_parameters = sum(layer.num_parameters for layer in layers_here)
        first = stages_text(stages), layers, f"{num_parameters:,}"
        if predicted is None:
            stage = stages[0]
            yield (
                *first,
                plan.recompute[stage].value + (", offload" if plan.offload[stage] else ""),
                " ".join(str(rank) for row in plan.placement.ranks[stage] for rank in row),
                plan.placement.devices[stage],
                "?" if plan.predicted_s is None else time_text(plan.predicted_s[stage]),
            )
        else:
            yield (*first, *_mesh_cells(plan, stages[0], [predicted[n] for n in stages]))


def segments_of(plan: "Plan") -> Iterator[range]:
    """Yield the consecutive stages on each mesh; several on one mesh are segments."""
    for _, same_mesh in groupby(range(plan.num_stages), key=plan.placement.ranks.__getitem__):
        stages = [*same_mesh]
        yield range(stages[0], stages[-1] + 1)


def stages_text(stages: range) -> str:
    """Write the numbers of consecutive stages."""
    return "-".join(str(n) for n in dict.fromkeys((stages[0], stages[-1])))


def span_text(names: Sequence[str]) -> str:
    """Name consecutive layers by the first and the last."""
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"


def _mesh_cells(plan: "Plan", stage: int, segments: Sequence[PredictedStage]) -> Iterator[str]:
    last = segments[-1]
    yield mesh_text(plan, stage)
    yield devices_text(plan, stage)
    yield time_text(sum(segment.forward_s for segment in segments))
    yield time_text(sum(segment.backward_s for segment in segments))
    yield time_text(last.handover_s) if last.handover_s else "-"
    yield bytes_text(sum(segment.state_bytes for segment in segments))
    yield bytes_text(sum(segment.kept_bytes for segment in segments))
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
