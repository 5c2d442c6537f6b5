"""A timeline as text for a terminal: one row a rank, time runs to the right.

rank 0 |F0  F1  F2  F3  ................B0      B1      B2      B3      |
rank 1 |....F0  F1  F2  F3  ........B0      B1      B2      B3      ....|
rank 2 |........F0  F1  F2  F3  B0      B1      B2      B3      ........|
F forward  B backward  . idle    step 18 s, bubble 33.3%
"""

from bisect import bisect_left
from collections.abc import Callable
from fractions import Fraction
from math import gcd, lcm
from numbers import Rational

from penstock.schedules import ir

from .looks import DRAWN, IDLE, look_of
from .timeline import Timeline
from .units import percent_text, time_text

_LOOK_OF = {look.letter: look for look in (*DRAWN.values(), IDLE)}
"""The look of each letter."""
_ROUNDING = 1e-6
"""Columns by which a box may be narrower than its label."""


def render_grid(
    timeline: Timeline,
    width: int = 100,
    *,
    text_of: Callable[[float], str] = time_text,
) -> str:
    """Draw `timeline` in rows of at most `width` characters, with a legend below.

    A box begins with its letter and micro-batch, and before them its stage, if a rank has several.
    If these do not fit, its letter fills it.  Dots are time without layers running.  `text_of`
    writes the length of the step.
    """
    heads = [f"rank {rank}" for rank in range(timeline.num_ranks)]
    margin = max(map(len, heads), default=0)
    columns = _fitting_columns(timeline, max(1, width - margin - 3))
    texts, letters = _cells(timeline, columns)
    lines = [
        f"{head:>{margin}} |{''.join(text)}|" for head, text in zip(heads, texts, strict=True)
    ]
    seen = [kind for kind in _LOOK_OF if any(kind in kinds for kinds in letters)]
    legend = "  ".join(f"{kind} {_LOOK_OF[kind].name}" for kind in seen)
    summary = f"step {text_of(timeline.step_s)}, bubble {percent_text(timeline.bubble)}"
    return "\n".join([*lines, f"{legend}    {summary}"])


def _cells(timeline: Timeline, columns: int) -> tuple[list[list[str]], list[list[str]]]:
    """Return each rank's characters, and the letter of the instruction in each column."""
    texts = [["."] * columns for _ in range(timeline.num_ranks)]
    letters = [["."] * columns for _ in range(timeline.num_ranks)]
    many = timeline.schedule.num_stages > timeline.num_ranks
    origin_s, column_s = timeline.start_s, (timeline.step_s or 1) / columns
    # a column shows one instant: its place in the column is spread by the golden ratio, since the
    # middle would show only every n-th of boxes that are narrower than a column
    places = ((0.5 + n * (5**0.5 - 1) / 2) % 1 for n in range(columns))
    instants_s = [origin_s + (n + place) * column_s for n, place in enumerate(places)]
    for span in timeline.spans:
        box = span.instruction
        if isinstance(box, ir.Compute):
            first, end = bisect_left(instants_s, span.start_s), bisect_left(instants_s, span.end_s)
            letter = look_of(box).letter
            label = f"{box.stage if many else ''}{letter}{box.microbatch}"
            size = end - first
            fits = len(label) <= min(size, span.duration_s / column_s + _ROUNDING)
            texts[span.rank][first:end] = label.ljust(size) if fits else letter * size
            letters[span.rank][first:end] = letter * size
    return texts, letters


def _fitting_columns(timeline: Timeline, most: int) -> int:
    """Return the most columns, up to `most`, on whose borders exact times lie, else `most`."""
    origin_s = timeline.start_s
    borders: set[object] = {span.start_s - origin_s for span in timeline.spans}
    borders |= {span.end_s - origin_s for span in timeline.spans}
    # a tick is the largest time that divides all others: each takes a whole number of columns
    exact = [Fraction(time_s) for time_s in borders if isinstance(time_s, Rational)]
    if not exact or len(exact) < len(borders):
        return most
    common = lcm(*(time_s.denominator for time_s in exact))
    ticks = [int(time_s * common) for time_s in exact]
    num_ticks = max(ticks) // (gcd(*ticks) or 1)
    return most - most % num_ticks if 0 < num_ticks <= most else most
