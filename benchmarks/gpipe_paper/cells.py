"""A cell of a table of the paper, beside what was predicted of it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

MET, MISSED, NO_TARGET = "met", "missed", ""


class Compared(Enum):
    """How a target is meant."""

    BY_RATIO = "ratio"
    BY_DIFFERENCE = "difference"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """`predicted` is of the setting that the paper's code documents, `others` of those that it
    might have had as well.  Without `published` there is nothing to compare with.
    """

    table: str
    model: str
    what: str
    published: float | None
    predicted: float | None
    others: Sequence[float] = ()
    target: float | None = None
    by: Compared = Compared.BY_RATIO
    form: str = ".2f"

    @property
    def ratio(self) -> float | None:
        """Predicted over published."""
        if not self.published or self.predicted is None:
            return None
        return self.predicted / self.published

    @property
    def verdict(self) -> str:
        """Whether the target is met, where there is one."""
        if self.target is None or self.published is None or self.predicted is None:
            return NO_TARGET
        off = abs(self.predicted - self.published)
        if self.by is Compared.BY_RATIO:
            off /= self.published
        return MET if off <= self.target else MISSED

    def row(self) -> dict[str, Any]:
        """Return the cell as a row of the report: texts, and the numbers behind them."""
        every = [x for x in (self.predicted, *self.others) if x is not None]
        low, high = min(every, default=None), max(every, default=None)
        return {
            "table": self.table,
            "model": self.model,
            "what": self.what,
            "published_text": self._text(self.published),
            "predicted_text": self._text(self.predicted),
            "range": f"{self._text(low)} to {self._text(high)}" if self.others else "",
            "ratio": self.ratio,
            "target_text": self._target_text(),
            "verdict": self.verdict,
            "published": self.published,
            "predicted": self.predicted,
            "low": low,
            "high": high,
        }

    def _text(self, number: float | None) -> str:
        return "" if number is None else format(number, self.form)

    def _target_text(self) -> str:
        if self.target is None:
            return ""
        if self.by is Compared.BY_RATIO:
            return f"{self.target:.0%}" if self.target else "as printed"
        return f"{self.target:.2f} either way"


def targets_line(cells: Iterable[Cell]) -> str:
    """Count the targets that are met, and name those that are not."""
    judged = [cell for cell in cells if cell.verdict]
    missed = [f"{c.model} {c.what}" for c in judged if c.verdict == MISSED]
    words = f"; missed: {', '.join(missed)}" if missed else ""
    return f"Targets: {len(judged) - len(missed)} of {len(judged)} are met{words}."
