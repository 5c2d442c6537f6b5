"""Is the pipeline the unsplit model?  One file runs it, one compares, one reports."""

from .check import check
from .report import CheckReport, CheckRow

__all__ = ["CheckReport", "CheckRow", "check"]
