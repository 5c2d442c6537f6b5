"""What a page shows, as values."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.trace.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Fact:
    """One figure of the page's head: what it is, and its value with unit."""

    name: str
    value: str
    remark: str = ""


@dataclass(frozen=True, slots=True)
class Text:
    """A paragraph; or with `is_code`, lines as they are."""

    text: str
    is_code: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells below their heads; columns of numbers stand to the right."""

    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Section:
    """Texts and tables under a title; those with `is_folded` are open only when asked for."""

    title: str
    parts: tuple[Text | Table, ...]
    is_folded: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A step, predicted or measured or both, and what is known of the run that it is from.

    What is None or empty is left out of the page.
    """

    title: str
    subtitle: str = ""
    facts: tuple[Fact, ...] = ()
    """Figures that the page cannot compute, before those that it can."""
    predicted: Timeline | None = None
    measured: Timeline | None = None
    optimizer_s: float = 0.0
    """What the step spends on moving weights outside of its timeline: the measured one, or else
    the predicted one."""
    set_up_s: float = 0.0
    """What it spent outside of its timeline on all else."""
    memory: Timeline | None = None
    """The step whose memory was measured; without it `measured`."""
    memory_limits_bytes: tuple[int, ...] = ()
    """What the device of each rank has."""
    kept_limits_bytes: tuple[int, ...] = ()
    """What each rank may keep for backward passes."""
    metrics: tuple[Mapping[str, Any], ...] = ()
    """Lines of metrics.jsonl: kind, step, and numbers by name."""
    sections: tuple[Section, ...] = ()
    notes: tuple[str, ...] = field(default=())
    """What the reader should know of the page itself, such as what could not be read."""
