"""A page as values, written as one HTML text that needs no other file and no network."""

import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from penstock.errors import ConfigError

SIGNATURE = '<meta name="generator" content="penstock">'
"""A tag near the top of every page, which tells our pages from other files."""
_HEAD_CHARACTERS = 500
"""Characters at the top of a page that contain its signature."""
_NUMBER = re.compile(r"[-+]?\d[\d,.]*(%| ?(s|ms|µs|bytes|[KMG]iB))?|-|\?|")
"""A cell of a column of numbers."""
_MANY_LETTERS = 60
"""Letters of a cell beyond which its column may break lines."""


@dataclass(frozen=True, slots=True)
class Fact:
    """One figure of the page's head: its name, and its value with unit."""

    name: str
    value: str
    remark: str = ""


@dataclass(frozen=True, slots=True)
class Text:
    """A paragraph of one kind: "words", a "note" in small print, a "hint" for the screen only, or
    lines of "code".
    """

    text: str
    kind: str = "words"


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells below their heads; columns of numbers stand to the right."""

    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    title: str = ""
    kind: ClassVar = "table"

    @property
    def styles(self) -> list[str]:
        """The class of each column: "number", "words" that may need several lines, or none."""
        columns = list(zip(*self.rows, strict=True)) or [()] * len(self.heads)
        return [
            "number"
            if n and all(map(_NUMBER.fullmatch, column))
            else "words" * (max(map(len, column), default=0) > _MANY_LETTERS)
            for n, column in enumerate(columns)
        ]


@dataclass(frozen=True, slots=True)
class Figure:
    """A chart as data and layout for plotly.js.

    The page's script sets the colours that depend on dark or light.  It knows shapes by name:
    "ground" behind a lane, "limit" a line of memory.
    """

    name: str
    data: tuple[dict[str, Any], ...]
    layout: dict[str, Any]
    note: str = ""
    """A note of the data that is not drawn."""
    title: str = ""
    label: str = ""
    """What the chart shows, in words for people who cannot see it."""
    kind: ClassVar = "figure"

    @property
    def meta(self) -> str:
        """ "step" for a chart over the time of a step, "curve" for one over steps, or nothing."""
        return str(self.layout.get("meta", ""))


@dataclass(frozen=True, slots=True)
class Section:
    """Texts, tables and figures under a title: one below the other, or in a grid."""

    title: str
    parts: tuple[Text | Table | Figure, ...]
    is_grid: bool = False

    @property
    def has_curves(self) -> bool:
        """Whether the page offers a log scale and smoothing for its charts."""
        return any(isinstance(part, Figure) and part.meta == "curve" for part in self.parts)


@dataclass(frozen=True, slots=True)
class Page:
    """A title and sections, with figures above them; empty parts are left out."""

    title: str
    subtitle: str = ""
    facts: tuple[Fact, ...] = ()
    sections: tuple[Section, ...] = ()
    notes: tuple[str, ...] = ()
    """Notes on the page itself, such as files that could not be read."""
    advice: str = ""
    """One sentence on what to change."""


def check_page(output: Path) -> None:
    """Raise a ConfigError unless plotly is there, and `output` is new, or a page of ours."""
    _plotly_js()
    if not output.exists():
        return
    with suppress(OSError), output.open(encoding="utf-8", errors="replace") as file:
        if SIGNATURE in file.read(_HEAD_CHARACTERS):
            return
    raise ConfigError(
        f"{output} exists already and is no report; choose another name, or move it away"
    )


def _plotly_js() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise ConfigError(
            "the page of a report needs plotly, which is not installed: "
            "pip install 'penstock[report]'"
        ) from None
    text: str = get_plotlyjs()
    return text


def write_page(page: Page, output: Path) -> None:
    """Write a page into `output`, over a page of ours; a ConfigError if it cannot be written."""
    check_page(output)
    unfinished = output.with_name(f".{output.name}.unfinished")  # a reader sees a whole page
    try:
        unfinished.write_text(render_page(page), encoding="utf-8")
        unfinished.replace(output)
    except OSError as error:
        raise ConfigError(f"cannot write {output}: {error.strerror}") from error


def render_page(page: Page) -> str:
    """Write `page` as HTML, all its text escaped; a ConfigError if plotly is not installed."""
    from jinja2 import Environment, FileSystemLoader

    here = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True
    )
    here.policies["json.dumps_kwargs"] = {"default": float, "allow_nan": False}
    parts = (part for section in page.sections for part in section.parts)
    figures = {
        part.name: {"data": part.data, "layout": part.layout}
        for part in parts
        if isinstance(part, Figure)
    }
    return here.get_template("page.html").render(
        page=page, signature=SIGNATURE, figures=figures, library=_plotly_js(), meanings=MEANINGS
    )


MEANINGS = {
    "activations": "Memory of the values that backward passes need.",
    "backward": "Time of backward passes, without those parts that have a column of their own.",
    "bubble": "Share of the ranks' time in which they had nothing to do.",
    "communication": "Time in which messages between ranks were on their way.",
    "handover": "Time of a message to the next stage that no work hides.",
    "layout": "The part of a weight that each device of the mesh holds.",
    "load imbalance": "Idle time because stages are not equally slow.",
    "memory": "Peak memory of the device that needs most.",
    "mesh": "The devices that compute a stage together.",
    "MFU": "Model FLOPs utilisation: FLOP/s of the model without recomputes, as a share of the "
    "devices' peak.",
    "micro-batches": "The parts of a mini-batch that pass through the stages one after the other.",
    "recompute": "Second forward passes, for values that were not kept.",
    "recomputed": "The layers that run forward a second time, for values that were not kept.",
    "reduction": "Sums of gradients over replicas.",
    "replicas": "Copies of the model, each with its part of a mini-batch.",
    "schedule": "The order of forward and backward passes on each rank.",
    "set-up": "The rest of a step, outside of its timeline.",
    "share of ideal": "Utilisation as a share of that without messages and late starts.",
    "stage": "Layers that follow each other and run on the same devices.",
    "stages": "A stage is layers that follow each other and run on the same devices.",
    "to the next": "Bytes of a micro-batch to the next stage.",
    "weight backward": "The parts of backward passes that compute gradients of weights.",
    "weights etc.": "Memory of weights, gradients and optimizer state.",
}
"""The meanings of the words of a page, which shows one when a reader points at its word."""
