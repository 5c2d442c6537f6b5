"""A calibration as a table, and as the comment of a file."""

import json
from collections.abc import Iterator, Sequence

from penstock.costs.cluster_table import rate_text
from penstock.plain_values import to_json
from penstock.trace.table import columns
from penstock.trace.units import percent_text, time_text

from .calibrate import Calibration
from .figures import Figure


def calibration_lines(figures: Sequence[Figure]) -> Iterator[str]:
    """Yield a table of what was measured: medians with their quartiles."""
    rows = [("measured", "median", "quartiles")]
    for figure in figures:
        middle, low, high = (_text(figure, value) for value in figure.spread)
        rows.append((figure.name, middle, f"{low} to {high}"))
    yield from columns(rows, num_left=1)


def comment_of(calibration: Calibration) -> str:
    """Return what a file says of its figures: what was measured, with its spread."""
    return "\n".join(
        (
            "Written by penstock doctor --calibrate; edit what you know better.  Measured:",
            "",
            *calibration_lines(calibration.figures),
            *([calibration.warning] if calibration.warning else ()),
        )
    )


def as_line(calibration: Calibration) -> str:
    """Return all of it as one line of JSON."""
    figures = [
        {
            "name": f.name,
            "unit": f.unit,
            **dict(zip(("middle", "low", "high"), f.spread, strict=True)),
        }
        for f in calibration.figures
    ]
    return json.dumps(
        {
            "cluster": json.loads(to_json(calibration.cluster)),
            "figures": figures,
            "warning": calibration.warning,
        }
    )


def _text(figure: Figure, value: float) -> str:
    if figure.unit == "s":
        return time_text(value)
    if figure.unit.endswith("/s"):
        return rate_text(value, figure.unit.removesuffix("/s"))
    return percent_text(value)
