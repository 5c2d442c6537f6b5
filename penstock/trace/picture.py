"""A timeline as a picture, SVG or PNG: one lane a rank.

Needs matplotlib, which comes with `penstock[demo]`; it is imported when a picture is drawn.
"""

import os
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigError
from penstock.schedules.ir import Compute

from .breakdown import waits_s
from .looks import DRAWN, IDLE, WAIT, Look
from .timeline import Span, Timeline
from .units import count_text, percent_text, time_text, unit_for

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_RC: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "svg.hashsalt": "penstock",  # equal timelines give equal files
}
_LANE_IN, _MARGINS_IN = 0.36, 1.3
_LANE_HEIGHT = 0.86
_POINTS_PER_IN = 72
_SEEN_POINTS = 0.4
_FONT_POINTS = 7.0
_DIGIT_EMS = 0.64  # width of a digit, in font sizes


def save_picture(
    timeline: Timeline, path: str | os.PathLike[str], *, title: str | None = None
) -> None:
    """Draw `timeline` into the file `path`; its suffix, .svg or .png, says how.

    The title line says how many ranks and micro-batches there are (or `title`), how long the step
    took, and the bubble's share.

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


def _figure(timeline: Timeline, title: str | None) -> "Figure":
    from matplotlib.figure import Figure

    programs = timeline.schedule.programs
    busiest = max(sum(isinstance(x, Compute) for x in program) for program in programs)
    width_in = min(16.0, max(9.0, 0.125 * busiest))
    height_in = _MARGINS_IN + timeline.num_ranks * _LANE_IN
    figure = Figure(figsize=(width_in, height_in), layout="constrained")
    axes = figure.add_subplot()
    _draw_lanes(axes, timeline, width_in * _POINTS_PER_IN / timeline.step_s)
    axes.spines[["left", "right", "top"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    unit = unit_for(timeline.step_s)
    axes.set_xlim(0, float(timeline.step_s * unit.per_s))
    axes.set_xlabel(f"time ({unit.sign})")
    size = f"{count_text(timeline.num_ranks, 'rank')}, "
    size += count_text(timeline.schedule.num_microbatches, "micro-batch")
    line = f"{title or size}:  step {time_text(timeline.step_s)}, "
    line += f"bubble {percent_text(timeline.bubble)}"
    axes.set_title(line, loc="left", fontsize=10.5, weight="bold")
    return figure


def _draw_lanes(axes: "Axes", timeline: Timeline, points_per_s: float) -> None:
    """Draw a lane a rank: idle ground, boxes by kind, messages on their way; and the legend."""
    ranks = range(timeline.num_ranks)
    whole = timeline.start_s, timeline.end_s
    _draw_boxes(axes, timeline, [(rank, *whole) for rank in ranks], IDLE)
    looks = []
    for kind, look in DRAWN.items():
        spans = [span for span in timeline.spans if isinstance(span.instruction, kind)]
        if spans:
            boxes = [(span.rank, span.start_s, span.end_s) for span in spans]
            edge = 0.12 * median(span.duration_s for span in spans) * points_per_s
            _draw_boxes(axes, timeline, boxes, look, edge_points=min(0.7, edge))
            _write_numbers(axes, timeline, spans, look, points_per_s)
            looks.append(look)
    waits = [
        (span.rank, span.end_s - wait_s, span.end_s)
        for span, wait_s in zip(timeline.spans, waits_s(timeline), strict=True)
        if wait_s * points_per_s > _SEEN_POINTS
    ]
    _draw_boxes(axes, timeline, waits, WAIT)
    axes.set_ylim(len(ranks) - 0.5, -0.5)
    axes.set_yticks(ranks, [f"rank {rank}" for rank in ranks])
    _draw_legend(axes, [*looks, *([WAIT] if waits else []), IDLE])


def _draw_boxes(
    axes: "Axes",
    timeline: Timeline,
    boxes: list[tuple[int, float, float]],
    look: Look,
    *,
    edge_points: float = 0,
) -> None:
    """Draw boxes (rank, start, end in seconds) in the lanes of their ranks."""
    zero_s, per_s = timeline.start_s, unit_for(timeline.step_s).per_s
    for rank in sorted({rank for rank, _, _ in boxes}):
        here = [
            (float((start_s - zero_s) * per_s), float((end_s - start_s) * per_s))
            for other, start_s, end_s in boxes
            if other == rank
        ]
        lane = (rank - _LANE_HEIGHT / 2, _LANE_HEIGHT)
        axes.broken_barh(
            here, lane, facecolors=look.fill, edgecolors="white", linewidth=edge_points
        )


def _write_numbers(
    axes: "Axes", timeline: Timeline, spans: list[Span], look: Look, points_per_s: float
) -> None:
    """Write micro-batch numbers into boxes that have room; where ranks have several stages,
    stage:micro-batch.
    """
    many = timeline.schedule.num_stages > timeline.num_ranks
    unit = unit_for(timeline.step_s)
    for span in spans:
        work = span.instruction
        assert isinstance(work, Compute)  # the only kinds that have a letter
        number = f"{work.stage}:{work.microbatch}" if many else f"{work.microbatch}"
        if span.duration_s * points_per_s > len(number) * _DIGIT_EMS * _FONT_POINTS + 3:
            middle_s = (span.start_s + span.end_s) / 2 - timeline.start_s
            where: dict[str, Any] = {"ha": "center", "va": "center_baseline"}
            place = float(middle_s * unit.per_s), span.rank
            axes.text(*place, number, color=look.ink, size=_FONT_POINTS, **where)


def _draw_legend(axes: "Axes", looks: list[Look]) -> None:
    from matplotlib.patches import Patch

    axes.figure.legend(
        handles=[Patch(facecolor=look.fill, label=look.name) for look in looks],
        loc="outside lower left",
        ncols=len(looks),
        frameon=False,
    )
