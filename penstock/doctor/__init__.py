"""Examine a job before it runs: can its settings, hosts and links train, and how fast?"""

from .examine import Report, examine
from .facts import gather_facts, processor_name

__all__ = ["Report", "examine", "gather_facts", "processor_name"]
