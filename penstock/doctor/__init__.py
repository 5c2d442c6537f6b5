"""BEFORE IT RUNS: can a job with these settings, hosts and links train at all, and how fast?"""

from .examine import Report, examine
from .facts import gather_facts

__all__ = ["Report", "examine", "gather_facts"]
