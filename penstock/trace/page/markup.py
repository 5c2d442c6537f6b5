"""Write values as HTML, with everything that comes from outside escaped; and what all charts have
in common: a figure is data and layout, as plotly.js takes them.
"""

import json
import re
from dataclasses import dataclass
from html import escape
from typing import Any

from .page import Fact, Section, Table, Text

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


MOST_ROWS = 400
_LONG = 12
"""Lines from which on code stands in columns."""
_NUMBER = re.compile(r"[-+]?\d[\d,.]*(%| ?(s|ms|µs|bytes|[KMG]iB))?|-|\?|")
_MANY_LETTERS = 60
"""Letters of a cell beyond which the words of its column may go on in a second line."""


def fact_html(fact: Fact) -> str:
    """Write a figure of the head."""
    remark = f"<small>{escape(fact.remark)}</small>" if fact.remark else ""
    value = f"<dd>{escape(fact.value)}{remark}</dd>"
    return f'<div class="fact"><dt>{escape(fact.name)}</dt>{value}</div>'


def section_html(anchor: str, title: str, body: str) -> str:
    """Write a section under its title; `body` is HTML."""
    return f'<section id="{anchor}">\n<h2>{escape(title)}</h2>\n{body}\n</section>'


def parts_html(section: Section) -> str:
    """Write the texts and tables of a section."""
    body = "\n".join(
        table_html(x) if isinstance(x, Table) else text_html(x) for x in section.parts
    )
    if not section.is_folded:
        return body
    return f"<details><summary>show</summary>\n{body}\n</details>"


def text_html(text: Text) -> str:
    """Write a paragraph, or lines as they are."""
    words = escape(text.text)
    if not text.is_code:
        return f"<p>{words}</p>"
    kind = ' class="long"' if words.count("\n") > _LONG else ""
    return f"<pre{kind}>{words}</pre>"


def table_html(table: Table) -> str:
    """Write a table; of very long ones the first rows."""
    columns = zip(*table.rows, strict=True) if table.rows else ((),) * len(table.heads)
    kinds = [
        ' class="number"'
        if n and all(map(_NUMBER.fullmatch, column))
        else ' class="words"'
        if max(map(len, column), default=0) > _MANY_LETTERS
        else ""
        for n, column in enumerate(columns)
    ]
    lines = [_row("th", table.heads, kinds)]
    lines += [_row("td", row, kinds) for row in table.rows[:MOST_ROWS]]
    rows = "\n".join(lines)
    whole = f'<div class="wide"><table>\n{rows}\n</table></div>'
    if len(table.rows) > MOST_ROWS:
        whole += note_html(f"The first {MOST_ROWS} of {len(table.rows):,} rows.")
    return whole


def _row(tag: str, cells: tuple[str, ...], kinds: list[str]) -> str:
    inner = (
        f"<{tag}{kind}>{escape(cell)}</{tag}>" for cell, kind in zip(cells, kinds, strict=True)
    )
    return f"<tr>{''.join(inner)}</tr>"


def note_html(text: str) -> str:
    """Write a remark in small print; nothing for no text."""
    return f'<p class="note">{escape(text)}</p>' if text else ""


def chart_html(name: str, title: str = "", note: str = "") -> str:
    """Write the place of a chart that the page's script draws."""
    head = f"<h3>{escape(title)}</h3>" if title else ""
    return (
        f'<figure>{head}<div class="chart" data-figure="{escape(name)}" role="img" '
        f'aria-label="{escape(title or name)}"></div>{note_html(note)}</figure>'
    )


def data_html(figures: dict[str, Figure]) -> str:
    """Write all charts as JSON that can stand within a page, whatever it holds."""
    values: dict[str, Any] = {
        name: {"data": figure.data, "layout": figure.layout} for name, figure in figures.items()
    }
    text = json.dumps(values, separators=(",", ":"), default=float, allow_nan=False)
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text
