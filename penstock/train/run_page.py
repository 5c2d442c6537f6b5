"""The report of a run: what its folder holds, as a page.  Needs no torch."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from penstock.errors import PenstockError, RunFolderError
from penstock.planner.plan import Plan
from penstock.planner.plan_page import plan_section, plan_subtitle
from penstock.trace.page import Fact, Page, Section, Table, Text, render_page
from penstock.trace.page.render import check_replaceable
from penstock.trace.timeline import Timeline
from penstock.trace.units import bytes_text

from .run_files import (
    ENVIRONMENT,
    MEMORY,
    METRICS,
    PLAN,
    PREDICTED,
    RECIPE,
    STEP,
    SUMMARY,
    TIMELINE,
    metrics_lines,
    metrics_of,
    replace_text,
)


def environment_section(text: str) -> Section:
    """Write what `environment_of` noted as two tables: versions, and processes.

    Raises:
        ValueError, LookupError, TypeError, AttributeError: it is something else.
    """
    facts = json.loads(text)
    processes = facts["processes"]
    first = processes[0]
    rows = [
        ("penstock", first["penstock"]),
        ("torch", f"{first['torch']} ({first['torch_build']})"),
        ("python", first["python"]),
        ("safetensors", first["safetensors"]),
        ("system", facts["system"]),
    ]
    heads = ("rank", "host", "processor", "cores", "threads", "memory", "GPUs")
    return Section(
        "Environment",
        (
            Text(facts["command"], is_code=True),
            Table(("", "version"), tuple((str(name), str(value)) for name, value in rows)),
            Table(heads, tuple(_row(process) for process in processes)),
        ),
    )


def _row(process: Mapping[str, Any]) -> tuple[str, ...]:
    gpus = [f"{gpu['name']}, {bytes_text(gpu['memory_bytes'])}" for gpu in process["gpus"]]
    return (
        str(process["rank"]),
        str(process["host"]),
        str(process["processor"]) or "-",
        str(len(process["cores"])),
        str(process["num_threads"]),
        bytes_text(process["memory_bytes"]),
        "; ".join(gpus) or "none",
    )


_T = TypeVar("_T")


def write_page(run: Path, output: Path, predicted: Path | None = None) -> None:
    """Write the report of the run folder `run` into the file `output`; renew one of ours.

    `predicted` is a timeline as JSON that is shown above the measured one, instead of the run
    folder's own predicted.json.

    Raises:
        RunFolderError: there is no run folder, or another file is in the way.
        ConfigError: plotly is not installed.
    """
    check_replaceable(output)
    replace_text(output, render_page(page_of(run, predicted)))


def page_of(run: Path, predicted: Path | None = None) -> Page:
    """Gather what a run folder holds; what cannot be read is noted on the page.

    Raises:
        RunFolderError: there is no run folder; or `predicted` is given and cannot be read.
    """
    if not (run / RECIPE).is_file():
        what = f"holds no {RECIPE}" if run.is_dir() else "does not exist"
        raise RunFolderError(
            f"no report: {run} {what}; give a run folder, such as runs/digits-1, that "
            "`penstock train` made"
        )
    reader = _Reader(run)
    timeline = reader.read(TIMELINE, Timeline.from_json)
    plan = reader.read(PLAN, Plan.from_json)
    summary = reader.read(SUMMARY, _mapping) or {}
    step = reader.read(STEP, _mapping) or {}
    environment = reader.read(ENVIRONMENT, environment_section)
    recipe = reader.read(RECIPE, lambda text: Section("Recipe", (Text(text, is_code=True),)))
    optimizer_s, set_up_s = _outside_s(step, timeline)
    metrics = (metrics_of(line) for line in metrics_lines(run / METRICS))
    planned = None if plan is None else plan_section(plan)
    sections = (*_stages(summary), planned, recipe, environment)
    if timeline is None and TIMELINE not in reader.unread:
        reader.notes.append("No step of this run was timed: it has made fewer than three.")
    return Page(
        title=run.resolve().name,
        subtitle="" if plan is None else plan_subtitle(plan),
        facts=_facts(summary),
        measured=timeline,
        predicted=_given(predicted) if predicted else reader.read(PREDICTED, Timeline.from_json),
        optimizer_s=optimizer_s,
        set_up_s=set_up_s,
        memory=reader.read(MEMORY, Timeline.from_json),
        kept_limits_bytes=(plan and plan.memory_limit_bytes) or (),
        metrics=tuple(line for line in metrics if line is not None),
        sections=tuple(section for section in sections if section is not None),
        notes=tuple(reader.notes),
    )


class _Reader:
    """Reads files of a run folder, and notes which of them cannot be read."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self.notes: list[str] = []
        self.unread: set[str] = set()

    def read(self, name: str, parse: Callable[[str], _T]) -> _T | None:
        """Return what a file holds; None where there is none, or it cannot be read."""
        path = self._run / name
        if not path.exists():
            return None
        try:
            return _parsed(path, parse)
        except RunFolderError as error:
            self.unread.add(name)
            self.notes.append(f"Left out: {error}.")
            return None


def _parsed(path: Path, parse: Callable[[str], _T]) -> _T:
    try:
        return parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RunFolderError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise RunFolderError(f"{path} is damaged ({type(error).__name__}: {error})") from None
    except PenstockError as error:
        raise RunFolderError(f"{path} is damaged: {error}") from None


def _given(path: Path) -> Timeline:
    try:
        return _parsed(path, Timeline.from_json)
    except RunFolderError as error:
        raise RunFolderError(
            f"--predicted: {error}; give what `timeline.to_json()` wrote"
        ) from None


def _mapping(text: str) -> dict[str, Any]:
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError("it holds no object")
    return found


def _outside_s(step: Mapping[str, Any], timeline: Timeline | None) -> tuple[float, float]:
    """Return the seconds of the timed step outside of its timeline: optimizer, and all else."""
    step_s, optimizer_s = step.get("step_s"), step.get("optimizer_s")
    if timeline is None or not isinstance(step_s, float) or not isinstance(optimizer_s, float):
        return 0.0, 0.0
    return optimizer_s, max(0.0, step_s - timeline.step_s - optimizer_s)


def _facts(summary: Mapping[str, Any]) -> tuple[Fact, ...]:
    """Return what a run came to, for the page's head."""
    shown = summary.get("shown")
    facts = [Fact(str(k), str(v)) for k, v in shown.items()] if isinstance(shown, dict) else []
    speed, steps, seconds = (summary.get(k) for k in ("samples_per_s", "steps", "seconds"))
    if isinstance(speed, float) and speed:
        facts.append(Fact("throughput", f"{speed:,.0f} {summary.get('unit', 'samples')}/s"))
    if isinstance(steps, int) and isinstance(seconds, float):
        state = "" if summary.get("finished") else ", interrupted"
        facts.append(Fact("trained", f"{steps:,} steps", f"{seconds:,.1f} s{state}"))
    return tuple(facts)


def _stages(summary: Mapping[str, Any]) -> tuple[Section, ...]:
    """Return what each stage kept for its backward passes."""
    stages = summary.get("stages")
    if not isinstance(stages, list):
        return ()
    rows = [
        (
            str(stage.get("stage")),
            _bytes(stage.get("peak_bytes")),
        )
        for stage in stages
        if isinstance(stage, dict)
    ]
    heads = ("stage", "for backward passes, at most")
    return (Section("Kept by each stage", (Table(heads, tuple(rows)),)),) if rows else ()


def _bytes(number: object) -> str:
    return bytes_text(number) if isinstance(number, int | float) else "-"
