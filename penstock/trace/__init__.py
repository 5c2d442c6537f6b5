"""SEEN: timelines of steps, breakdowns of their time, and drawings."""

from .breakdown import Breakdown, StageTimes, breakdown
from .chrome import to_chrome
from .grid import render_grid
from .timeline import MemoryKind, MemorySample, Span, Timeline

__all__ = [
    "Breakdown",
    "MemoryKind",
    "MemorySample",
    "Span",
    "StageTimes",
    "Timeline",
    "breakdown",
    "render_grid",
    "to_chrome",
]
