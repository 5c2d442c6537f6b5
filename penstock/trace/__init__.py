"""SEEN: what happened when, where the time went, and pictures of it."""

from .breakdown import Breakdown, StageTimes, breakdown
from .chrome import to_chrome
from .grid import render_grid
from .picture import save_picture
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
    "save_picture",
    "to_chrome",
]
