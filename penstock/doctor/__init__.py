"""Examine a job before it runs: can its settings, hosts and links train, and how fast?"""

from .examine import Report, examine
from .facts import gather_facts

__all__ = ["Report", "examine", "gather_facts"]
