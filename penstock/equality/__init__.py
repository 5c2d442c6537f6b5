"""Compare a step of a pipeline with the unsplit model's: run, compare, report."""

from .check import check
from .report import CheckReport, CheckRow

__all__ = ["CheckReport", "CheckRow", "check"]
