"""The table of a plan's stages: a row for each, with its predicted figures."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, groupby, pairwise
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING

from penstock.trace.units import bytes_text, time_text
from penstock.types import RecomputeLayers

if TYPE_CHECKING:
    from .plan import Plan


@dataclass(frozen=True, slots=True)
class PredictedStage:
    """The predicted figures of a stage on a mesh, for one micro-batch.

    `handover_s` are the seconds to send `sent_bytes` to the next stage and to receive their
    gradients.  Each device has `state_bytes` of weights, gradients and optimizer state, and at
    most `kept_bytes` of activations.
    """

    forward_s: float
    backward_s: float
    handover_s: float
    state_bytes: int
    kept_bytes: int
    sent_bytes: int


MESH_HEADS = (
    *("stage", "layers", "parameters", "recompute", "devices", "mesh"),
    *("forward", "backward", "handover", "weights etc.", "activations", "to the next"),
)
_HEADS = ("stage", "layers", "parameters", "recompute", "ranks", "device", "micro-batch")
_MOST_ROWS = 12
"""Rows from which on stages of equal layers share one, whatever their figures."""
_FEW = 2
"""Rows that stay apart, if they are alike."""


@dataclass(frozen=True, slots=True)
class _Row:
    """Stages that share a row: the names of the layers of each, and the parameters of each; words
    that are equal for all, the numbers of their devices, and figures, each with its text.
    """

    stages: range
    layers: tuple[Sequence[str], ...]
    num_parameters: int
    words: tuple[str, ...]
    devices: tuple[tuple[int, ...], ...]
    figures: tuple[tuple[float, str], ...]

    @property
    def kind(self) -> object:
        """The facts that are equal in a row, even where its figures differ."""
        return len(self.layers[0]), self.num_parameters, self.words


def stage_rows(plan: "Plan") -> Iterator[Sequence[str]]:
    """Yield the heads of the table, then a row for each stage.

    Three stages or more share a row if all their figures are equal; in a long table also if only
    their layers are, and the row has the least and the most of each figure.
    """
    is_on_meshes = plan.predicted_stages is not None
    yield MESH_HEADS if is_on_meshes else _HEADS
    rows = [*_each_row(plan)]
    folded = _folded(rows, lambda row: (row.kind, [text for _, text in row.figures]))
    if len(folded) > _MOST_ROWS:
        folded = _folded(rows, attrgetter("kind"))
    for row in folded:
        name = span_text([*dict.fromkeys(map(str, (row.stages[0], row.stages[-1])))])
        count = f"{len(row.layers[0])}{' each' * (len(row.layers) > 1)}"
        layers = f"{count}: {span_text([*chain(*row.layers)])}"
        where = _place_text(plan, row.devices) if is_on_meshes else _numbers_text(row.devices)
        words = (row.words[0], where, *row.words[1:])
        yield name, layers, f"{row.num_parameters:,}", *words, *(text for _, text in row.figures)


def _each_row(plan: "Plan") -> Iterator[_Row]:
    """Yield a row for each stage."""
    for stage, (start, end) in enumerate(pairwise(accumulate(plan.partition, initial=0))):
        if plan.predicted_stages is None:
            words: tuple[str, ...] = (_recomputed(plan, stage), plan.placement.devices[stage])
            devices = tuple(rank for row in plan.placement.ranks[stage] for rank in row)
            seconds = None if plan.predicted_s is None else plan.predicted_s[stage]
            figures = [(0.0, "?") if seconds is None else (seconds, time_text(seconds))]
        else:
            words = _recomputed(plan, stage), mesh_text(plan, stage)
            devices = _devices_of(plan, stage)
            figures = [*_figures(plan.predicted_stages[stage])]
        layers = plan.layers[start:end]
        names, size = [layer.name for layer in layers], sum(x.num_parameters for x in layers)
        stages = range(stage, stage + 1)
        yield _Row(stages, (names,), size, words, (devices,), tuple(figures))


def _recomputed(plan: "Plan", stage: int) -> str:
    policy = plan.recompute[stage]
    if isinstance(policy, RecomputeLayers):  # which may name layers of other stages, too
        policy = RecomputeLayers(plan.recomputed(stage))
    return policy.value + (", offload" if plan.offload[stage] else "")


def _figures(own: PredictedStage) -> Iterator[tuple[float, str]]:
    yield own.forward_s, time_text(own.forward_s)
    yield own.backward_s, time_text(own.backward_s)
    yield own.handover_s, time_text(own.handover_s) if own.handover_s else "-"
    yield own.state_bytes, bytes_text(own.state_bytes)
    yield own.kept_bytes, bytes_text(own.kept_bytes)
    yield own.sent_bytes, bytes_text(own.sent_bytes) if own.sent_bytes else "-"


def _folded(rows: Sequence[_Row], key: Callable[[_Row], object]) -> list[_Row]:
    """Make one row of each run of rows with the same key, if they are more than a few."""
    found = []
    for _, run in groupby(rows, key):
        alike = [*run]
        found += alike if len(alike) <= _FEW else [_together(alike)]
    return found


def _together(rows: Sequence[_Row]) -> _Row:
    """Return the row of several, with the least and the most of each figure that is not 0."""
    figures = []
    for every in zip(*(row.figures for row in rows), strict=True):
        column = [*filter(itemgetter(0), every)] or every  # the last stage sends nothing
        least, most = min(column), max(column)
        texts = dict.fromkeys((least[1], most[1]))
        figures.append((most[0], " to ".join(texts)))
    return replace(
        rows[0],
        stages=range(rows[0].stages[0], rows[-1].stages[-1] + 1),
        layers=tuple(chain(*(row.layers for row in rows))),
        devices=tuple(chain(*(row.devices for row in rows))),
        figures=tuple(figures),
    )


def span_text(names: Sequence[str]) -> str:
    """Name consecutive layers by the first and the last."""
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"


def mesh_text(plan: "Plan", stage: int) -> str:
    """Write the lengths of the axes of a stage's mesh."""
    return " x ".join(map(str, plan.placement.shard_axes_of(stage)))


def devices_text(plan: "Plan", stage: int) -> str:
    """Write the numbers of a stage's devices, and the hosts that these are in."""
    return _place_text(plan, (_devices_of(plan, stage),))


def _devices_of(plan: "Plan", stage: int) -> tuple[int, ...]:
    return tuple(plan.devices_of(stage) or plan.placement.ranks[stage][0])


def _place_text(plan: "Plan", meshes: Sequence[tuple[int, ...]]) -> str:
    text = _numbers_text(meshes)
    if plan.cluster is None:
        return text
    hosts = dict.fromkeys(plan.cluster.places[n].host_name for n in _numbers(meshes))
    return f"{text} of {span_text([*hosts])}"


def _numbers_text(meshes: Sequence[tuple[int, ...]]) -> str:
    numbers = _numbers(meshes)
    is_row = numbers == [*range(numbers[0], numbers[-1] + 1)] and len(numbers) > 1
    return f"{numbers[0]}-{numbers[-1]}" if is_row else " ".join(map(str, numbers))


def _numbers(meshes: Sequence[tuple[int, ...]]) -> list[int]:
    """Return the numbers of the devices of a mesh, or of several in order, each once."""
    return [*meshes[0]] if len(meshes) == 1 else sorted({*chain(*meshes)})
