"""The report of a run: a page of the files in its folder.  Needs no torch."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from penstock import Plan, Timeline
from penstock.errors import PenstockError
from penstock.trace.page import Fact, Page, Section, Step, Table, Text, curves, with_step
from penstock.trace.units import bytes_text, percent_text, rate_text
from penstock_recipes.errors import RunFolderError

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
)

_T = TypeVar("_T")


def page_of(run: Path, predicted: Path | None = None) -> Page:
    """Collect the files of a run folder; the page lists those that cannot be read.

    `predicted` is a timeline as JSON, shown above the measured one in place of predicted.json.

    Raises:
        RunFolderError: there is no run folder; or `predicted` is given and cannot be read.
    """
    check_run(run)
    # Each part of the page comes from one file, which may be absent.
    reader = RunReader(run)
    plan = reader.read(PLAN, Plan.from_json)
    facts, memory = reader.read(SUMMARY, _of_summary) or ((), ())
    lines = (metrics_of(line) for line in metrics_lines(run / METRICS))
    drawn = tuple(curves([line for line in lines if line is not None]))
    step = reader.step(plan, predicted)
    sections = (
        Section("Curves", drawn, is_grid=True) if drawn else None,
        *memory,
        None if plan is None else _of_plan(plan),
        reader.read(RECIPE, lambda text: Section("Recipe", (Text(text, "code"),))),
        reader.read(ENVIRONMENT, _of_environment),
    )
    page = Page(
        run.resolve().name,
        "" if plan is None else str(plan).splitlines()[0],
        facts,
        tuple(section for section in sections if section is not None),
        tuple(reader.notes),
    )
    return with_step(page, step)


def check_run(run: Path) -> None:
    """Refuse a folder that is not of a run.

    Raises:
        RunFolderError: it holds no recipe, or does not exist.
    """
    if not (run / RECIPE).is_file():
        what = f"holds no {RECIPE}" if run.is_dir() else "does not exist"
        raise RunFolderError(
            f"no report: {run} {what}; give a run folder, such as runs/digits-1, that "
            "`penstock train` made"
        )


class RunReader:
    """Reads the files of a run folder, and notes those that cannot be read."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self.notes: list[str] = []

    def read(self, name: str, parse: Callable[[str], _T]) -> _T | None:
        """Parse a file; return None if it is absent or cannot be read."""
        path = self._run / name
        if not path.exists():
            return None
        try:
            return _parsed(path, parse)
        except RunFolderError as error:
            self.notes.append(f"Left out: {error}.")
            return None

    def step(self, plan: Plan | None = None, predicted: Path | None = None) -> Step:
        """Return the timed step, the step with traced memory, and the predicted timeline.

        Raises:
            RunFolderError: `predicted` cannot be read.
        """
        measured = self.read(TIMELINE, Timeline.from_json)
        if not (self._run / TIMELINE).exists():
            self.notes.append("No step of this run was timed: it has made fewer than three.")
        seconds = self.read(STEP, _of_step)
        step_s, optimizer_s = seconds if seconds and measured else (0.0, 0.0)
        return Step(
            measured=measured,
            predicted=_from_option(predicted)
            if predicted
            else self.read(PREDICTED, Timeline.from_json),
            optimizer_s=optimizer_s,
            set_up_s=max(0.0, step_s - measured.step_s - optimizer_s) if measured else 0.0,
            memory=self.read(MEMORY, Timeline.from_json),
            kept_limits_bytes=(plan and plan.memory_limit_bytes) or (),
        )


def _parsed(path: Path, parse: Callable[[str], _T]) -> _T:
    try:
        return parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RunFolderError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise RunFolderError(f"{path} is damaged ({type(error).__name__}: {error})") from None
    except PenstockError as error:
        raise RunFolderError(f"{path} is damaged: {error}") from None


def _from_option(path: Path) -> Timeline:
    try:
        return _parsed(path, Timeline.from_json)
    except RunFolderError as error:
        raise RunFolderError(
            f"--predicted: {error}; give what `timeline.to_json()` wrote"
        ) from None


def _of_step(text: str) -> tuple[float, float]:
    """Return the seconds of the timed step, and of its weight update outside of the timeline.

    Both are 0 if the timeline shows only one of several parts of the step.
    """
    facts = json.loads(text)
    return (0.0, 0.0) if facts["step_s"] is None else (facts["step_s"], facts["optimizer_s"])


def _of_plan(plan: Plan) -> Section:
    """Show the plan: its reasons below the page's subtitle, and a table of its stages."""
    heads, *rows = (tuple(row) for row in plan.rows)
    lines = (line for reason in plan.reasons[1:] for line in reason.splitlines())
    return Section("Plan", (*map(Text, lines), Table(heads, tuple(rows))))


def _of_summary(text: str) -> tuple[tuple[Fact, ...], tuple[Section, ...]]:
    """Return the results of a run, and the activation memory of each stage."""
    summary = json.loads(text)
    facts = [Fact(name, value) for name, value in summary["shown"].items()]
    if summary["samples_per_s"]:
        speed = f"{summary['samples_per_s']:,.0f} {summary['unit']}/s"
        facts.append(Fact("throughput", speed))
    state = "" if summary["finished"] else ", interrupted"
    seconds = f"{summary['seconds']:,.1f} s{state}"
    facts.append(Fact("trained", f"{summary['steps']:,} steps", seconds))
    peaks = {stage["stage"]: stage["peak_bytes"] for stage in summary["stages"]}
    rows = tuple((str(n), "-" if p is None else bytes_text(p)) for n, p in peaks.items())
    table = Table(("stage", "for backward passes, at most"), rows)
    tables = [table] if rows else []
    devices = tuple(map(_of_device, summary.get("devices", ())))
    if devices:
        heads = ("device", "allocated, at most", "reserved, at most", "of", "reserved share")
        tables.append(Table(heads, devices, "Accelerators of the first process, over the run"))
    return (*facts, *_speed(summary)), (Section("Peak memory", tuple(tables)),) if tables else ()


def _speed(summary: Mapping[str, Any]) -> Iterator[Fact]:
    """Yield the FLOP/s and the MFU of a run, as far as they are known."""
    rate, mfu = summary.get("flops_per_s"), summary.get("mfu")
    if rate:
        yield Fact("model FLOP/s", rate_text(rate, "FLOP"), "without recomputes")
    if mfu:
        yield Fact("MFU", percent_text(mfu), "of the devices' peak")


def _of_device(device: Mapping[str, Any]) -> tuple[str, ...]:
    sizes = [device[f"{name}_bytes"] for name in ("allocated", "reserved", "total")]
    return (device["device"], *map(bytes_text, sizes), percent_text(sizes[1] / sizes[2]))


def _of_environment(text: str) -> Section:
    """Show environment.json as two tables: versions, and processes."""
    facts = json.loads(text)
    first = facts["processes"][0]
    versions = {name: first[name] for name in ("penstock", "torch", "python", "safetensors")}
    versions |= {"torch": f"{first['torch']} ({first['torch_build']})", "system": facts["system"]}
    heads = ("rank", "host", "processor", "cores", "threads", "memory", "GPUs")
    return Section(
        "Environment",
        (
            Text(facts["command"], "code"),
            Table(("", "version"), tuple((name, str(value)) for name, value in versions.items())),
            Table(heads, tuple(map(_of_process, facts["processes"]))),
        ),
    )


def _of_process(facts: Mapping[str, Any]) -> tuple[str, ...]:
    gpus = [f"{gpu['name']}, {bytes_text(gpu['memory_bytes'])}" for gpu in facts["gpus"]]
    return (
        *(str(facts[name]) or "-" for name in ("rank", "host", "processor")),
        str(len(facts["cores"])),
        str(facts["num_threads"]),
        bytes_text(facts["memory_bytes"]),
        "; ".join(gpus) or "none",
    )
