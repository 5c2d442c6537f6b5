"""Measure one training step and draw it: the picture in the README.

Usage: python docs/make_timeline.py [FILE]       with matplotlib
"""

import sys
from pathlib import Path

import torch
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from torch import nn

from penstock import Pipeline
from penstock.schedules import one_f_one_b
from penstock.schedules.ir import Compute
from penstock.trace import Timeline
from penstock.trace.breakdown import waits_s
from penstock.trace.looks import DRAWN, IDLE, WAIT, Look

_MS = 1e3


def draw(timeline: Timeline, file: Path) -> None:
    """Draw a lane for each rank: boxes by kind with their micro-batches, and messages."""
    figure = Figure(figsize=(9.0, 1.3 + 0.36 * timeline.num_ranks), layout="constrained")
    axes = figure.add_subplot()

    def box(rank: int, start_s: float, end_s: float, look: Look) -> None:
        where = ((start_s - timeline.start_s) * _MS, (end_s - start_s) * _MS)
        edge = 0 if look in (IDLE, WAIT) else 0.7
        lane = (rank - 0.43, 0.86)
        axes.broken_barh([where], lane, facecolors=look.fill, edgecolors="white", linewidth=edge)

    for rank in range(timeline.num_ranks):
        box(rank, timeline.start_s, timeline.end_s, IDLE)
    for span, wait_s in zip(timeline.spans, waits_s(timeline), strict=True):
        if isinstance(work := span.instruction, Compute):
            look = DRAWN[type(work)]
            box(span.rank, span.start_s, span.end_s, look)
            middle_ms = ((span.start_s + span.end_s) / 2 - timeline.start_s) * _MS
            place = {"ha": "center", "va": "center_baseline", "size": 7}
            axes.text(middle_ms, span.rank, str(work.microbatch), color=look.ink, **place)
        elif wait_s:
            box(span.rank, span.end_s - wait_s, span.end_s, WAIT)
    axes.set_ylim(timeline.num_ranks - 0.5, -0.5)
    axes.set_yticks(range(timeline.num_ranks), [f"rank {n}" for n in range(timeline.num_ranks)])
    axes.set_xlim(0, timeline.step_s * _MS)
    axes.set_xlabel("time (ms)")
    axes.spines[["left", "right", "top"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    title = f"{timeline.num_ranks} ranks, {timeline.schedule.num_microbatches} micro-batches:  "
    title += f"step {timeline.step_s * _MS:.0f} ms, bubble {timeline.bubble:.1%}"
    axes.set_title(title, loc="left", fontsize=10.5, weight="bold")
    kinds = {type(span.instruction) for span in timeline.spans}
    looks = (*(look for kind, look in DRAWN.items() if kind in kinds), WAIT, IDLE)
    legend = [Patch(facecolor=look.fill, label=look.name) for look in looks]
    figure.legend(handles=legend, loc="outside lower left", ncols=len(legend), frameon=False)
    figure.savefig(file, dpi=160)


def main() -> None:
    """Train a few steps of a small convolution network as a pipeline; draw the last one."""
    torch.manual_seed(0)
    width = 32
    blocks = [
        nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())
        for _ in range(8)
    ]
    images, targets = torch.randn(64, width, 48, 48), torch.randn(64, width, 48, 48)
    with Pipeline(
        blocks,
        partition=[4, 4],
        num_microbatches=8,
        loss=nn.MSELoss(),
        schedule=one_f_one_b,
        threads_per_stage=1,
        trace=True,
    ) as pipe:
        for _ in range(5):
            pipe.train_step(images, targets)
        assert pipe.last_timeline is not None
        file = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("timeline.png")
        draw(pipe.last_timeline, file)


if __name__ == "__main__":
    main()
