"""A step or a run as one HTML page that needs nothing else: charts, tables and texts."""

from .page import Fact, Page, Section, Table, Text, render_page
from .step import Step, with_step

__all__ = ["Fact", "Page", "Section", "Step", "Table", "Text", "render_page", "with_step"]
