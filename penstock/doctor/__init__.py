"""BEFORE IT RUNS: can a job with these settings, hosts and links train at all, and how fast?"""

from .examine import examine
from .finding import Finding, Severity
from .report import Report

__all__ = ["Finding", "Report", "Severity", "examine"]
