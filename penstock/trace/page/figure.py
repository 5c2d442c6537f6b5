"""What all charts have in common: a figure is data and layout, as plotly.js takes them."""

from dataclasses import dataclass
from typing import Any

Trace = dict[str, Any]
Layout = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Figure:
    """A chart; colours that depend on dark or light are set by the page's script.

    Shapes are named for what they are: "ground" behind a lane, "limit" a line of memory.
    """

    data: tuple[Trace, ...]
    layout: Layout
    note: str = ""
    """What is left out of it."""


def rounded(value: float) -> float:
    """Round to six significant digits, which no chart can show more of."""
    return float(f"{float(value):.6g}")


def layout_of(height_px: float, **more: Any) -> Layout:
    """Return the layout of a chart of so many pixels, with what is the same in all."""
    return {
        "height": height_px,
        "margin": {"l": 74, "r": 16, "t": 34, "b": 50, "pad": 4},
        "legend": {
            "orientation": "h",
            "x": 0,
            "xanchor": "left",
            "y": 1,
            "yanchor": "bottom",
            "traceorder": "normal",
        },
        "hoverlabel": {"align": "left", "namelength": -1},
        "bargap": 0,
        "barmode": "overlay",
        "hovermode": "closest",
        **more,
    }


def caption(text: str, y: float, *, x: float = 0.0) -> dict[str, Any]:
    """Return an annotation above a part of a chart; `y` is a share of the chart's height."""
    return {
        "text": text,
        "x": x,
        "y": y,
        "xref": "paper",
        "yref": "paper",
        "xanchor": "left",
        "yanchor": "bottom",
        "showarrow": False,
    }
