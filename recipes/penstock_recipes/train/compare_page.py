"""Compare runs: their curves over each other, and what differs in recipes and figures.

Needs no torch.
"""

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock import Plan
from penstock.trace.page import Metrics, Page, Section, Table, Text, curves_of_runs
from penstock.trace.units import (
    bytes_text,
    columns,
    count_text,
    percent_text,
    rate_text,
    time_text,
)

from .run_files import METRICS, PLAN, RECIPE, STEP, SUMMARY, metrics_lines, metrics_of
from .run_page import RunReader, check_run

_NONE = "-"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Runs by name, with the texts of their recipes and figures."""

    recipes: Mapping[str, Mapping[str, str]]
    """The value of each key of a run's recipe."""
    figures: Mapping[str, Mapping[str, str]]
    metrics: Mapping[str, Metrics]
    notes: tuple[str, ...] = ()
    """The files that could not be read."""

    @property
    def tables(self) -> tuple[Table, Table]:
        """The keys of the recipes that differ, and all figures."""
        names = tuple(self.recipes)
        differing = (row for row in _rows(self.recipes) if len(set(row[1:])) > 1)
        return (
            Table(("recipe", *names), tuple(differing)),
            Table(("figure", *names), tuple(_rows(self.figures))),
        )

    def __str__(self) -> str:
        """Return both tables as text."""
        lines: list[str] = []
        for table in self.tables:
            if table.rows:
                lines += [*columns([table.heads, *table.rows], num_left=1), ""]
            elif table.heads[0] == "recipe":
                lines += ["The recipes are the same.", ""]
        return "\n".join([*lines, *self.notes]).rstrip()


def compare_runs(runs: Sequence[Path]) -> Comparison:
    """Read the files of run folders.

    Raises:
        RunFolderError: a folder is not of a run.
    """
    recipes: dict[str, Mapping[str, str]] = {}
    figures: dict[str, Mapping[str, str]] = {}
    metrics: dict[str, Metrics] = {}
    notes: list[str] = []
    for name, run in zip(_names(runs), runs, strict=True):
        check_run(run)
        reader = RunReader(run)
        recipes[name] = reader.read(RECIPE, _of_recipe) or {}
        figures[name] = {
            **(reader.read(SUMMARY, _of_summary) or {}),
            **(reader.read(STEP, _of_step) or {}),
            **(reader.read(PLAN, _of_plan) or {}),
        }
        lines = map(metrics_of, metrics_lines(run / METRICS))
        metrics[name] = [line for line in lines if line is not None]
        notes += reader.notes
    return Comparison(recipes, figures, metrics, tuple(notes))


def compare_page(comparison: Comparison) -> Page:
    """Return the page of a comparison."""
    recipe, figures = comparison.tables
    same = Text("The recipes are the same.")
    drawn = tuple(curves_of_runs(comparison.metrics))
    sections = (
        Section("Figures", (figures,)),
        Section("Curves", drawn, is_grid=True) if drawn else None,
        Section("What differs in the recipes", (recipe if recipe.rows else same,)),
    )
    return Page(
        " and ".join(comparison.recipes),
        f"{count_text(len(comparison.recipes), 'run')} beside each other",
        sections=tuple(section for section in sections if section is not None),
        notes=comparison.notes,
    )


def _names(runs: Sequence[Path]) -> list[str]:
    """Name runs by their folders; runs of the same name by their paths."""
    names = [run.resolve().name for run in runs]
    return [
        name if names.count(name) == 1 else str(run) for name, run in zip(names, runs, strict=True)
    ]


def _rows(of_runs: Mapping[str, Mapping[str, str]]) -> Iterator[tuple[str, ...]]:
    """Yield a row for each key that any run has."""
    for key in dict.fromkeys(key for values in of_runs.values() for key in values):
        yield (key, *(values.get(key, _NONE) for values in of_runs.values()))


def _of_recipe(text: str) -> dict[str, str]:
    """Return the value of each key, as "section.key"."""
    return {
        f"{section}.{key}": str(value)
        for section, keys in tomllib.loads(text).items()
        for key, value in keys.items()
    }


def _of_summary(text: str) -> dict[str, str]:
    """Return the scores and figures of summary.json."""
    summary: dict[str, Any] = json.loads(text)
    figures = dict(summary["shown"])
    figures["steps"] = f"{summary['steps']:,}" + ("" if summary["finished"] else ", interrupted")
    figures["trained"] = f"{summary['seconds']:,.1f} s"
    if summary["samples_per_s"]:
        figures["throughput"] = f"{summary['samples_per_s']:,.0f} {summary['unit']}/s"
    shares = {"bubble": "bubble", "share_of_ideal": "share of ideal", "mfu": "MFU"}
    for name, title in shares.items():
        if summary.get(name) is not None:
            figures[title] = percent_text(summary[name])
    if summary.get("flops_per_s"):
        figures["model FLOP/s"] = rate_text(summary["flops_per_s"], "FLOP")
    peaks = [stage["peak_bytes"] for stage in summary["stages"] if stage["peak_bytes"]]
    if peaks:
        figures["kept for backward passes, at most"] = bytes_text(max(peaks))
    return figures


def _of_step(text: str) -> dict[str, str]:
    step_s = json.loads(text)["step_s"]
    return {} if step_s is None else {"timed step": time_text(step_s)}


def _of_plan(text: str) -> dict[str, str]:
    plan = Plan.from_json(text)
    return {
        "stages": str(plan.num_stages),
        "replicas": str(plan.placement.num_replicas),
        "micro-batches": str(plan.num_microbatches),
        "schedule": plan.schedule.name,
    }
