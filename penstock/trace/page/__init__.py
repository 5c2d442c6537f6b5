"""A step or a run as one HTML page that needs nothing else: charts, tables and texts."""

from .charts import Metrics, curves, curves_of_runs
from .page import Fact, Page, Section, Table, Text, render_page, write_page
from .step import Step, with_step

__all__ = [
    "Fact",
    "Metrics",
    "Page",
    "Section",
    "Step",
    "Table",
    "Text",
    "curves",
    "curves_of_runs",
    "render_page",
    "with_step",
    "write_page",
]
