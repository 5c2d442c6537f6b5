"""What every benchmark shares: its table, the machine it ran on, and where both are written."""

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

import penstock

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_T = TypeVar("_T")
MOST_LOAD = 0.5
PLOT = "result.png"
PEERS = ("torchgpipe", "deepspeed")

BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table: its title, the key of its values, and how they are written."""

    title: str
    key: str
    form: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """What one benchmark measured in one run; printable as a Markdown table."""

    columns: tuple[Column, ...]
    rows: tuple[dict[str, Any], ...]
    settings: dict[str, Any]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = table_lines(self.columns, self.rows)
        settings = ", ".join(f"{key} {value}" for key, value in self.settings.items())
        facts = "; ".join(f"{key}: {value}" for key, value in machine().items())
        return "\n".join([*lines, "", f"{settings}.", *self.notes, "", facts])

    def to_json(self) -> str:
        """Give rows, settings and machine as JSON, unrounded."""
        whole = {"machine": machine(), "settings": self.settings, "rows": self.rows}
        return json.dumps(whole | {"notes": self.notes}, indent=1)


def table_lines(columns: Sequence[Column], rows: Sequence[dict[str, Any]]) -> list[str]:
    """Write rows as the lines of a Markdown table."""
    cells = [[column.title for column in columns]]
    cells += [[_cell(row, column) for column in columns] for row in rows]
    widths = [max(3, *map(len, column)) for column in zip(*cells, strict=True)]
    right = [bool(rows) and _is_number(rows[0].get(column.key)) for column in columns]
    rule = ["-" * (w - 1) + ":" if r else "-" * w for w, r in zip(widths, right, strict=True)]
    return [
        "| " + " | ".join(_pad(*cell) for cell in zip(row, widths, right, strict=True)) + " |"
        for row in [cells[0], rule, *cells[1:]]
    ]


def _cell(row: dict[str, Any], column: Column) -> str:
    value = row.get(column.key)
    return "" if value is None else format(value, column.form)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _pad(cell: str, width: int, right: bool) -> str:
    return cell.rjust(width) if right else cell.ljust(width)


def machine() -> dict[str, str]:
    """Say on what, with which versions and when this runs."""
    kind = "virtual " if _is_virtual() else ""
    hardware = f"{os.cpu_count()} {kind}cores ({_cpu_name()})"
    devices = range(torch.cuda.device_count())
    names = [torch.cuda.get_device_name(i) for i in devices]
    facts = {
        "hardware": ", ".join([hardware, *names]),
        "torch": f"{torch.__version__.partition('+')[0]} {'CUDA' if names else 'CPU'}",
        "Python": platform.python_version(),
        "penstock": penstock.__version__,
        "date": f"{datetime.now(UTC):%Y-%m}",
    }
    return facts | {peer: _version(peer) for peer in PEERS}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _cpu_info() -> str:
    path = Path("/proc/cpuinfo")
    return path.read_text() if path.exists() else ""


def _is_virtual() -> bool:
    return " hypervisor" in _cpu_info()


def _cpu_name() -> str:
    for line in _cpu_info().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


@dataclass(frozen=True, slots=True)
class Load:
    """How many processes wanted a core in the minute before: others' work spoils a timing."""

    before: float

    @classmethod
    def now(cls) -> "Load":
        """Look before measuring; one's own work counts later on."""
        return cls(os.getloadavg()[0])

    @property
    def notes(self) -> tuple[str, ...]:
        """Warn who reads figures that were measured beside other work."""
        if self.before < MOST_LOAD:
            return ()
        return (
            f"**Measure again:** the machine was busy with other work (load {self.before:.2f} "
            "before the start), so these times mean little.",
        )


def parser(description: str) -> argparse.ArgumentParser:
    """Give the options that every benchmark has."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--smallest", action="store_true", help="a few seconds; means nothing")
    options.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="write the figures there too, and the plot, where there is one, beside it as .png",
    )
    options.add_argument(
        "--update-readme",
        action="store_true",
        help="replace table and plot in this README by this run's",
    )
    return options


def counts(text: str) -> tuple[int, ...]:
    """Read "4,8,32", for argparse."""
    return tuple(int(part) for part in text.split(","))


def publish(
    report: Report,
    options: argparse.Namespace,
    folder: Path,
    draw: "Callable[[Figure], None] | None" = None,
    part: str = "",
) -> None:
    """Print a report, and write it and its plot where the options say; in a README with several
    tables, between the marks of a `part`.

    A README keeps its table where a run measured nothing, or ran in its smallest setting.
    """
    print(report)
    if options.json is not None:
        options.json.write_text(report.to_json() + "\n")
        _save_plot(draw, options.json.with_suffix(".png"))
    if options.update_readme and (options.smallest or not report.rows):
        progress("README.md keeps its table: this run has no figures for it")
    elif options.update_readme:
        _save_plot(draw, folder / PLOT)
        readme = folder / "README.md"
        what = f"measured {part}".strip()
        begin, end = (mark.replace("measured", what) for mark in (BEGIN, END))
        before, _, rest = readme.read_text().partition(begin)
        _, _, after = rest.partition(end)
        readme.write_text(f"{before}{begin}\n{report}\n{end}{after}")


def _save_plot(draw: "Callable[[Figure], None] | None", path: Path) -> None:
    if draw is None:
        return
    from matplotlib.figure import Figure  # slow to import, and most benchmarks have no plot

    figure = Figure(figsize=(9.0, 3.6), layout="constrained")
    draw(figure)
    figure.savefig(path, dpi=110)


def progress(text: str) -> None:
    """Say on stderr what is being measured, so that stdout holds the table only."""
    print(text, file=sys.stderr, flush=True)


def missing(module: str) -> str | None:
    """Say why a peer cannot be imported; None if it can."""
    try:
        import_module(module)
    except Exception as error:  # a peer that is too old fails in ways of its own
        return f"{type(error).__name__}: {error}"
    return None


def interleaved(contestants: Sequence[Callable[[], _T]], rounds: int) -> list[tuple[_T, ...]]:
    """Measure A B C, A B C, ...: what slows the machine for a while slows them all.

    Returns:
        What each contestant gave in each round, without the first round: a warm-up.
    """
    table = [tuple(measure() for measure in contestants) for _ in range(rounds + 1)]
    return list(zip(*table[1:], strict=True))
