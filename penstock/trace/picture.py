"""A timeline as a picture, SVG or PNG: one lane a rank, and below it what each stage keeps.

Needs matplotlib, which comes with `penstock[demo]`; it is imported when a picture is drawn.
"""

import os
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigError
from penstock.schedules.ir import Compute
from penstock.trace.units import count_text

from .breakdown import waits_s
from .looks import DRAWN, IDLE, KEPT, WAIT, Look
from .timeline import MemoryKind, Span, Timeline
from .units import bytes_text, percent_text, time_text, unit_for

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_RC: dict[Any, Any] = {
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
_TITLE_IN = 0.32
_LANE_HEIGHT = 0.86
_PEAK_X = 1.008
_POINTS_PER_IN = 72
_SEEN_POINTS = 0.4
_LEAST_FONT_POINTS = 5.0
_DIGIT_EMS = 0.64  # width of a digit, in font sizes


def save_picture(
    timeline: Timeline, path: str | os.PathLike[str], *, title: str | None = None
) -> None:
    """Draw `timeline` into the file `path`; its suffix, .svg or .png, says how.

    The title line says how many ranks and micro-batches there are (or `title`), how long the step
    took, and the bubble's share.  With traced memory, each stage's kept bytes are drawn below, all
    to one scale, with their peaks.

    Raises:
        ConfigError: another suffix, an empty timeline, or matplotlib is not installed.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in (".svg", ".png"):
        raise ConfigError(
            f"cannot draw a picture into {os.fspath(path)!r}: its name must end in .svg or .png."
        )
    if not timeline.step_s:
        raise ConfigError("cannot draw a timeline that lasts 0 seconds: was the step traced?")
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise ConfigError(
            "a picture needs matplotlib, which is not installed: pip install 'penstock[demo]', "
            "or use render_grid or to_chrome, which need nothing."
        ) from error
    with mpl.rc_context(_RC):
        metadata = {"Date": None} if suffix == ".svg" else {"Software": None}
        _figure(timeline, title).savefig(path, format=suffix[1:], dpi=160, metadata=metadata)


@dataclass(frozen=True, slots=True)
class _Scale:
    """Where on the time axis a span lies: in the axis's unit, and in points on paper."""

    start_s: float
    step_s: float
    width_in: float

    def box(self, start_s: float, end_s: float) -> tuple[float, float]:
        """Return the left edge and the width, in the axis's unit."""
        per_s = unit_for(self.step_s).per_s
        return float((start_s - self.start_s) * per_s), float((end_s - start_s) * per_s)

    def points(self, duration_s: float) -> float:
        return float(duration_s / self.step_s) * self.width_in * _POINTS_PER_IN


def _figure(timeline: Timeline, title: str | None) -> "Figure":
    """Lay the parts out, in inches from the bottom: time axis, memory strips, lanes, title."""
    from matplotlib.figure import Figure

    stages = sorted(timeline.peak_bytes())
    programs = timeline.schedule.programs
    busiest = max(sum(isinstance(x, Compute) for x in program) for program in programs)
    width_in = min(16.0, max(9.0, 0.125 * busiest))
    lanes_in, strips_in = timeline.num_ranks * _LANE_IN, len(stages) * _STRIP_IN
    gap_in = _GAP_IN if stages else 0
    height_in = _BOTTOM_IN + strips_in + gap_in + lanes_in + _TOP_IN
    figure = Figure(figsize=(width_in, height_in))
    inner_in = width_in - _LEFT_IN - _RIGHT_IN - (_PEAK_IN if stages else 0)
    scale = _Scale(timeline.start_s, timeline.step_s, inner_in)

    def axes_at(bottom_in: float, axes_in: float) -> "Axes":
        axes = figure.add_axes(
            (_LEFT_IN / width_in, bottom_in / height_in, inner_in / width_in, axes_in / height_in)
        )
        axes.spines[["left", "right", "top"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
        axes.set_xlim(0, sum(scale.box(timeline.start_s, timeline.end_s)))
        return axes

    lanes = axes_at(_BOTTOM_IN + strips_in + gap_in, lanes_in)
    _draw_lanes(lanes, scale, timeline)
    lowest = lanes
    if stages:
        lanes.spines["bottom"].set_visible(False)
        lanes.set_xticks([])
        lowest = axes_at(_BOTTOM_IN, strips_in)
        _draw_memory(lowest, scale, timeline)
    lowest.set_xlabel(f"time ({unit_for(timeline.step_s).sign})")
    line = f"{title or _size_text(timeline)}:  step {time_text(timeline.step_s)}, "
    line += f"bubble {percent_text(timeline.bubble)}"
    place = (_LEFT_IN / width_in, 1 - _TITLE_IN / height_in)
    figure.text(*place, line, fontsize=10.5, weight="bold")
    return figure


def _size_text(timeline: Timeline) -> str:
    ranks, microbatches = timeline.num_ranks, timeline.schedule.num_microbatches
    return f"{count_text(ranks, 'rank')}, {count_text(microbatches, 'micro-batch')}"


def _draw_lanes(axes: "Axes", scale: _Scale, timeline: Timeline) -> None:
    """Draw a lane a rank: idle ground, boxes by kind, messages on their way; and the legend."""
    ranks = range(timeline.num_ranks)
    ground = scale.box(timeline.start_s, timeline.end_s)
    _draw_boxes(axes, [(rank, ground) for rank in ranks], IDLE)
    drawn = []
    for kind, look in DRAWN.items():
        spans = [span for span in timeline.spans if isinstance(span.instruction, kind)]
        if spans:
            _draw_kind(axes, scale, spans, look, many=timeline.schedule.num_stages > len(ranks))
            drawn.append(look)
    waits = [
        (span.rank, scale.box(span.end_s - wait_s, span.end_s))
        for span, wait_s in zip(timeline.spans, waits_s(timeline), strict=True)
        if scale.points(wait_s) > _SEEN_POINTS
    ]
    _draw_boxes(axes, waits, WAIT)
    axes.set_ylim(len(ranks) - 0.5, -0.5)
    axes.set_yticks(ranks, [f"rank {rank}" for rank in ranks])
    _draw_legend(axes, [*drawn, *([WAIT] if waits else []), IDLE])


def _draw_kind(axes: "Axes", scale: _Scale, spans: list[Span], look: Look, *, many: bool) -> None:
    """Draw the boxes of one kind, and their micro-batch numbers if they can be read; where ranks
    have `many` stages, stage:micro-batch.
    """
    typical = median(scale.points(span.duration_s) for span in spans)
    boxes = [(span.rank, scale.box(span.start_s, span.end_s)) for span in spans]
    _draw_boxes(axes, boxes, look, edge_points=min(0.7, 0.12 * typical))
    numbers = [
        f"{s.instruction.stage}:{s.instruction.microbatch}"
        if many
        else f"{s.instruction.microbatch}"
        for s in spans
        if isinstance(s.instruction, Compute)
    ]
    size = min(8.5, (typical - 2) / max(map(len, numbers)) / _DIGIT_EMS)
    if size < _LEAST_FONT_POINTS:
        return
    for span, number, (rank, (left, width)) in zip(spans, numbers, boxes, strict=True):
        if scale.points(span.duration_s) >= len(number) * _DIGIT_EMS * size + 1:
            where: dict[str, Any] = {"ha": "center", "va": "center_baseline"}
            axes.text(left + width / 2, rank, number, color=look.ink, size=size, **where)


def _draw_boxes(
    axes: "Axes",
    boxes: list[tuple[int, tuple[float, float]]],
    look: Look,
    *,
    edge_points: float = 0,
) -> None:
    """Draw boxes (rank, (left edge, width)) in the lanes of their ranks."""
    for rank in sorted({rank for rank, _ in boxes}):
        lane = (rank - _LANE_HEIGHT / 2, _LANE_HEIGHT)
        here = [box for other, box in boxes if other == rank]
        axes.broken_barh(
            here, lane, facecolors=look.fill, edgecolors="white", linewidth=edge_points
        )


def _draw_legend(axes: "Axes", looks: list[Look]) -> None:
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


def _draw_memory(axes: "Axes", scale: _Scale, timeline: Timeline) -> None:
    """Draw a strip a stage: the bytes it keeps over time, relative to the largest peak of all."""
    beside = axes.get_yaxis_transform()
    peaks = timeline.peak_bytes()
    stages = sorted(peaks)
    most = max(peaks.values()) or 1
    for row, stage in enumerate(stages):
        samples = sorted(
            (s for s in timeline.memory if (s.stage, s.kind) == (stage, MemoryKind.ACTIVATIONS)),
            key=lambda s: s.time_s,
        )
        times = [*(s.time_s for s in samples), timeline.end_s]
        steps = [scale.box(start_s, end_s) for start_s, end_s in pairwise(times)]
        axes.stairs(
            [row + 0.5 - 0.86 * s.kept_bytes / most for s in samples],
            [*(left for left, _ in steps), sum(steps[-1])],
            baseline=row + 0.5,
            fill=True,
            color=KEPT.fill,
        )
        axes.axhline(row + 0.5, color=IDLE.fill, linewidth=1)
        axes.text(_PEAK_X, row + 0.2, bytes_text(peaks[stage]), transform=beside, va="center")
    axes.set_ylim(len(stages) - 0.5, -0.5)
    middles = [row + 0.2 for row in range(len(stages))]
    axes.set_yticks(middles, [f"stage {stage}" for stage in stages])
    axes.text(_PEAK_X, -0.45, "peak kept", transform=beside, va="bottom", color="#777777")
