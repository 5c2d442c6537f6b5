"""The boxes of a timeline's lanes: one for each span, fewer where there are many."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil

from penstock.schedules import ir
from penstock.trace.breakdown import waits_s
from penstock.trace.looks import WAIT, Look, look_of
from penstock.trace.timeline import Span, Timeline

MOST_BOXES = 9_000
"""Drawn of one timeline, so that a page stays small and quick."""
MOST_LANES = 48
_LANES_OF_MANY = 24
"""Where spans are merged, so that each lane keeps hundreds of boxes."""


_MOST_PARTS = 1_000
"""Of a step, where spans are merged: a part is about as wide as a pixel."""
_LEAST_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class Box:
    """What is drawn on the lane of a rank; seconds since the step's start.

    `stage` and `microbatch` are -1 where there is none.  A box that stands for `num_spans` spans
    has the look of what took most of its time, and was busy for this `share` of it.
    """

    rank: int
    look: Look
    start_s: float
    end_s: float
    stage: int = -1
    microbatch: int = -1
    num_bytes: int = 0
    num_spans: int = 1
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class Lanes:
    """What is drawn of a timeline: ranks that have a lane, their boxes, and what is left out."""

    ranks: tuple[int, ...]
    boxes: tuple[Box, ...]
    left_out: str = ""


def lanes_of(timeline: Timeline) -> Lanes:
    """Choose what to draw of a timeline."""
    ranks = spread(timeline.num_ranks, MOST_LANES)
    boxes = tuple(_boxes(timeline, set(ranks)))
    said = []
    if len(boxes) > MOST_BOXES or _are_thin(boxes, timeline.step_s):
        ranks = tuple(ranks[n] for n in spread(len(ranks), _LANES_OF_MANY))
        boxes = tuple(box for box in boxes if box.rank in set(ranks))
    if len(ranks) < timeline.num_ranks:
        said.append(f"{len(ranks)} of {timeline.num_ranks:,} ranks are drawn, evenly chosen")
    if len(boxes) > MOST_BOXES or _are_thin(boxes, timeline.step_s):
        many, num_parts = len(boxes), min(_MOST_PARTS, MOST_BOXES // len(ranks))
        boxes = tuple(_merged(boxes, timeline.step_s / num_parts))
        said.append(
            f"{many:,} spans are merged: each 1/{num_parts} of the step shows what took most of "
            "it, paler the longer it was idle"
        )
    return Lanes(ranks, boxes, "; ".join(said))


def spread(number: int, most: int) -> tuple[int, ...]:
    """Choose at most `most` of so many, evenly, the first and the last among them."""
    if number <= most:
        return tuple(range(number))
    return tuple(round(n * (number - 1) / (most - 1)) for n in range(most))


def _boxes(timeline: Timeline, ranks: set[int]) -> Iterator[Box]:
    """Yield a box for each span of these ranks in which something ran or a message moved."""
    zero_s = timeline.start_s
    sent_bytes = {
        ir.sent_message(span.instruction): span.num_bytes
        for span in timeline.spans
        if span.num_bytes
    }
    for span, wait_s in zip(timeline.spans, waits_s(timeline), strict=True):
        if span.rank not in ranks:
            continue
        look, start_s = look_of(span.instruction), span.start_s
        if not look.fill:
            look, start_s = WAIT, span.end_s - wait_s
        if span.end_s > start_s:
            num_bytes = span.num_bytes or _received(span, sent_bytes)
            yield _box(span, look, (start_s - zero_s, span.end_s - zero_s), num_bytes)


def _received(span: Span, sent_bytes: dict[ir.Message | None, int]) -> int:
    awaited = ir.awaited_message(span.instruction)
    return 0 if awaited is None else sent_bytes.get(awaited, 0)


def _box(span: Span, look: Look, when_s: tuple[float, float], num_bytes: int) -> Box:
    match span.instruction:
        case ir.CommitStatistics() | ir.ReduceGradients() | ir.UpdateWeights():
            microbatch = -1
        case of_microbatch:
            microbatch = of_microbatch.microbatch
    return Box(
        rank=span.rank,
        look=look,
        start_s=float(when_s[0]),
        end_s=float(when_s[1]),
        stage=span.instruction.stage,
        microbatch=microbatch,
        num_bytes=num_bytes,
    )


def _are_thin(boxes: Sequence[Box], step_s: float) -> bool:
    """Tell whether most of the time is in boxes narrower than a pixel of a wide screen, and so not
    seen; however many small ones, such as messages, there are between large ones.
    """
    widths_s = [box.end_s - box.start_s for box in boxes]
    thin_s = sum(width_s for width_s in widths_s if width_s < step_s / _MOST_PARTS)
    return thin_s > sum(widths_s) / 2


def _merged(boxes: Sequence[Box], part_s: float) -> Iterator[Box]:
    """Yield a box for each part of the step in which a rank was not idle throughout."""
    parts: dict[tuple[int, int], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    looks = {box.look.name: box.look for box in boxes}
    counts: dict[tuple[int, int], int] = defaultdict(int)
    for box in boxes:
        first, end = int(box.start_s / part_s), ceil(box.end_s / part_s)
        counts[box.rank, first] += 1
        for n in range(first, max(end, first + 1)):
            within_s = min(box.end_s, (n + 1) * part_s) - max(box.start_s, n * part_s)
            parts[box.rank, n][box.look.name] += within_s
    for (rank, n), times_s in parts.items():
        name = max(times_s, key=lambda name: times_s[name])
        share = min(1.0, sum(times_s.values()) / part_s)
        if share >= _LEAST_SHARE:
            when_s = n * part_s, (n + 1) * part_s
            yield Box(rank, looks[name], *when_s, num_spans=counts[rank, n], share=share)
