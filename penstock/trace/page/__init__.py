"""A step or a run as one HTML page that needs nothing else: charts, tables and texts."""

from .page import Fact, Page, Section, Table, Text
from .render import render_page

__all__ = ["Fact", "Page", "Section", "Table", "Text", "render_page"]
