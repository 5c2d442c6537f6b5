"""A timeline as a picture, SVG or PNG: one lane a rank, and below it what each stage keeps.

Needs matplotlib, which comes with `penstock[demo]`; it is imported when a picture is drawn.
"""

import os
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from penstock.errors import ConfigError
from penstock.schedules.ir import Backward, Compute, Forward, Recompute

from .breakdown import waits_s
from .timeline import Span, Timeline
from .units import bytes_text, percent_text, time_text, unit_for

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class _Look:
    name: str
    fill: str
    ink: str


# Hues and lightness both differ, so that the kinds stay apart for the colour-blind and in print.
_LOOKS: dict[type[Compute], _Look] = {
    Forward: _Look("forward", "#3f74a8", "white"),
    Recompute: _Look("recompute", "#b3d0e8", "#1f3550"),
    Backward: _Look("backward", "#e89f45", "#3d2400"),
}
_IDLE = _Look("idle", "#eeeeeb", "#333333")
_WAIT = _Look("message on its way", "#bcbcb6", "#333333")
_MEMORY = _Look("kept", "#9db8ad", "#33503f")
_RC = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "text.color": "#333333",
    "axes.labelcolor": "#333333",
    "axes.edgecolor": "#aaaaaa",
    "xtick.color": "#333333",
    "ytick.color": "#333333",
    "svg.hashsalt": "penstock",  # equal timelines give equal files
}
_LANE_IN, _STRIP_IN, _GAP_IN = 0.36, 0.28, 0.16
_LEFT_IN, _RIGHT_IN, _PEAK_IN, _TOP_IN, _BOTTOM_IN = 0.75, 0.25, 0.60, 0.68, 0.50
_LANE_HEIGHT = 0.86
_POINTS_PER_IN = 72
_SEEN_POINTS = 0.4
_LEAST_FONT_POINTS = 5.0
_DIGIT_EMS = 0.64  # width of a digit, in font sizes


def save_picture(timeline: Timeline, path: str | os.PathLike[str], *, title: str | None = None) -> None:
    """Draw `timeline` into the file `path`; its suffix, .svg or .png, says how.

    The title line says how many ranks and micro-batches there are (or `title`), how long the step
    took, and the bubble's share.  With traced memory, each stage's kept bytes are drawn below, all
    to one scale, with their peaks.

    Raises:
        ConfigError: another suffix, an empty timeline, or matplotlib is not installed.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in (".svg", ".png"):
        raise ConfigError(f"cannot draw a picture into {os.fspath(path)!r}: the name must end in .svg or .png.")
    if not timeline.step_s:
        raise ConfigError("there is nothing to draw: the timeline has no span that lasts. Was the step traced?")
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise ConfigError(
            "drawing a picture needs matplotlib, which is not installed: pip install 'penstock[demo]'. "
            "Without it, render_grid and to_chrome show the same timeline."
        ) from error
    with mpl.rc_context(_RC):
        metadata = {"Date": None} if suffix == ".svg" else {"Software": None}
        _figure(timeline, title).savefig(path, format=suffix[1:], dpi=160, metadata=metadata)


@dataclass(frozen=True, slots=True)
class _Scale:
    """Where on the time axis a span lies: in the axis's unit, and in points on paper."""

    timeline: Timeline
    width_in: float

    def box(self, start_s: float, end_s: float) -> tuple[float, float]:
        """Give the left edge and the width, in the axis's unit."""
        per_s = unit_for(self.timeline.step_s).per_s
        return float((start_s - self.timeline.start_s) * per_s), float((end_s - start_s) * per_s)

    def points(self, duration_s: float) -> float:
        return float(duration_s / self.timeline.step_s) * self.width_in * _POINTS_PER_IN


def _figure(timeline: Timeline, title: str | None) -> "Figure":
    """Lay the parts out, in inches from the bottom: time axis, memory strips, lanes, title."""
    from matplotlib.figure import Figure

    stages = sorted({sample.stage for sample in timeline.memory})
    busiest = max(sum(isinstance(i, Compute) for i in program) for program in timeline.schedule.programs)
    width_in = min(16.0, max(9.0, 0.125 * busiest))
    lanes_in, strips_in = timeline.num_ranks * _LANE_IN, len(stages) * _STRIP_IN
    gap_in = _GAP_IN if stages else 0
    height_in = _BOTTOM_IN + strips_in + gap_in + lanes_in + _TOP_IN
    figure = Figure(figsize=(width_in, height_in))
    inner_in = width_in - _LEFT_IN - _RIGHT_IN - (_PEAK_IN if stages else 0)
    scale = _Scale(timeline, inner_in)

    def axes_at(bottom_in: float, axes_in: float) -> "Axes":
        axes = figure.add_axes(
            (_LEFT_IN / width_in, bottom_in / height_in, inner_in / width_in, axes_in / height_in)
        )
        axes.spines[["left", "right", "top"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
        axes.set_xlim(0, sum(scale.box(timeline.start_s, timeline.end_s)))
        return axes

    lanes = axes_at(_BOTTOM_IN + strips_in + gap_in, lanes_in)
    _draw_lanes(lanes, scale)
    lowest = lanes
    if stages:
        lanes.spines["bottom"].set_visible(False)
        lanes.set_xticks([])
        lowest = axes_at(_BOTTOM_IN, strips_in)
        _draw_memory(lowest, scale, stages)
    lowest.set_xlabel(f"time ({unit_for(timeline.step_s).sign})")
    what = title or f"{timeline.num_ranks} ranks, {timeline.schedule.num_microbatches} micro-batches"
    numbers = f"step {time_text(timeline.step_s)}, bubble {percent_text(timeline.bubble)}"
    figure.text(_LEFT_IN / width_in, 1 - 0.32 / height_in, f"{what}:  {numbers}", fontsize=10.5, weight="bold")
    return figure


def _draw_lanes(axes: "Axes", scale: _Scale) -> None:
    """Draw a lane a rank: idle ground, boxes by kind, messages on their way; a legend of what is there."""
    timeline = scale.timeline
    drawn = []
    for rank in range(timeline.num_ranks):
        _draw_boxes(axes, rank, [scale.box(timeline.start_s, timeline.end_s)], _IDLE, edge_points=0)
    for kind, look in _LOOKS.items():
        spans = [span for span in timeline.spans if isinstance(span.instruction, kind)]
        if spans:
            _draw_kind(axes, scale, spans, look)
            drawn.append(look)
    waits = [
        (span.rank, scale.box(span.end_s - wait_s, span.end_s))
        for span, wait_s in zip(timeline.spans, waits_s(timeline), strict=True)
        if scale.points(wait_s) > _SEEN_POINTS
    ]
    for rank, box in waits:
        _draw_boxes(axes, rank, [box], _WAIT, edge_points=0)
    axes.set_ylim(timeline.num_ranks - 0.5, -0.5)
    axes.set_yticks(range(timeline.num_ranks), [f"rank {rank}" for rank in range(timeline.num_ranks)])
    _draw_legend(axes, [*drawn, *([_WAIT] if waits else []), _IDLE])


def _draw_kind(axes: "Axes", scale: _Scale, spans: list[Span], look: _Look) -> None:
    """Draw the boxes of one kind, and their micro-batch numbers in one size if that can be read."""
    typical = median(scale.points(span.duration_s) for span in spans)
    for rank in range(scale.timeline.num_ranks):
        boxes = [scale.box(span.start_s, span.end_s) for span in spans if span.rank == rank]
        _draw_boxes(axes, rank, boxes, look, edge_points=min(0.7, 0.12 * typical))
    digits = len(str(scale.timeline.schedule.num_microbatches - 1))
    size = min(8.5, (typical - 2) / digits / _DIGIT_EMS)
    if size < _LEAST_FONT_POINTS:
        return
    for span in spans:
        text = str(getattr(span.instruction, "microbatch", ""))
        if scale.points(span.duration_s) >= len(text) * _DIGIT_EMS * size + 1:
            left, width = scale.box(span.start_s, span.end_s)
            axes.text(
                left + width / 2, span.rank, text, color=look.ink, size=size, ha="center", va="center_baseline"
            )


def _draw_boxes(
    axes: "Axes", rank: int, boxes: list[tuple[float, float]], look: _Look, *, edge_points: float
) -> None:
    lane = (rank - _LANE_HEIGHT / 2, _LANE_HEIGHT)
    axes.broken_barh(boxes, lane, facecolors=look.fill, edgecolors="white", linewidth=edge_points)


def _draw_legend(axes: "Axes", looks: list[_Look]) -> None:
    from matplotlib.patches import Patch

    axes.legend(
        handles=[Patch(facecolor=look.fill, label=look.name) for look in looks],
        loc="lower left",
        bbox_to_anchor=(0, -0.65),
        bbox_transform=axes.get_yaxis_transform(),
        ncols=len(looks),
        frameon=False,
        handlelength=1.2,
        handleheight=0.9,
        handletextpad=0.5,
        columnspacing=1.4,
        borderaxespad=0,
        borderpad=0,
    )


def _draw_memory(axes: "Axes", scale: _Scale, stages: list[int]) -> None:
    """Draw a strip a stage: the bytes it keeps over time, as a share of the largest peak of all."""
    timeline = scale.timeline
    peaks = timeline.peak_bytes()
    most = max(peaks.values()) or 1
    for row, stage in enumerate(stages):
        samples = sorted((s for s in timeline.memory if s.stage == stage), key=lambda s: s.time_s)
        times = [*(s.time_s for s in samples), timeline.end_s]
        steps = [scale.box(start_s, end_s) for start_s, end_s in pairwise(times)]
        axes.stairs(
            [row + 0.5 - 0.86 * s.kept_bytes / most for s in samples],
            [*(left for left, _ in steps), sum(steps[-1])],
            baseline=row + 0.5,
            fill=True,
            color=_MEMORY.fill,
        )
        axes.axhline(row + 0.5, color=_IDLE.fill, linewidth=1)
        axes.text(1.008, row + 0.2, bytes_text(peaks[stage]), transform=axes.get_yaxis_transform(), va="center")
    axes.set_ylim(len(stages) - 0.5, -0.5)
    axes.set_yticks([row + 0.2 for row in range(len(stages))], [f"stage {stage}" for stage in stages])
    axes.text(1.008, -0.45, "peak kept", transform=axes.get_yaxis_transform(), va="bottom", color="#777777")
