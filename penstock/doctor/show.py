"""A report as tables and lines for a person."""

from itertools import groupby

from rich.console import Console
from rich.table import Table

from penstock.trace.units import bytes_text, time_text

from .edges import Edge
from .facts import RankFacts
from .finding import Finding, Severity
from .report import Report, rate_text

_COLORS = {Severity.ERROR: "bold red", Severity.WARNING: "yellow", Severity.INFO: "cyan"}
_WIDTH = 99
"""Columns where the output is no terminal."""


def show_report(report: Report) -> None:
    """Write everything to stdout."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_WIDTH)
    if report.ranks:
        console.print(_processes(report.ranks))
        console.print(_versions(report.ranks))
    if report.edges:
        console.print(_edges(report.edges))
    for line in _lines(report):
        console.print(line, soft_wrap=True, markup=False)
    for finding in report.findings:
        show_finding(console, finding)
    console.print(_verdict(report), soft_wrap=True, markup=False)


def show_finding(console: Console, finding: Finding) -> None:
    """Write one line."""
    console.print(f"{finding.severity.value:7} ", style=_COLORS[finding.severity], end="")
    console.print(str(finding), soft_wrap=True, markup=False)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for column in columns:
        left = column.startswith("<")
        table.add_column(column.lstrip("<"), justify="left" if left else "right")
    return table


def _processes(ranks: tuple[RankFacts, ...]) -> Table:
    table = _table(
        "processes", "rank", "<host", "<address", "cores", "threads", "memory", "<devices"
    )
    for facts in ranks:
        table.add_row(
            str(facts.rank),
            facts.host,
            facts.address,
            str(len(facts.cores)),
            str(facts.num_threads),
            bytes_text(facts.memory_bytes),
            _devices(facts),
        )
    return table


def _devices(facts: RankFacts) -> str:
    gpus = [f"{gpu.name} ({bytes_text(gpu.memory_bytes)})" for gpu in facts.gpus]
    counted = [(name, len(list(group))) for name, group in groupby(gpus)]
    return ", ".join(["CPU", *(f"{n} x {name}" if n > 1 else name for name, n in counted)])


def _versions(ranks: tuple[RankFacts, ...]) -> Table:
    table = _table("versions", "<ranks", "<Python", "<torch", "<built for", "<Penstock")
    table.add_column("safetensors")
    rows: dict[tuple[str, ...], list[str]] = {}
    for facts in ranks:
        versions = (facts.python, facts.torch, facts.torch_build, facts.penstock)
        rows.setdefault((*versions, facts.safetensors), []).append(str(facts.rank))
    for row, who in rows.items():
        table.add_row("all" if len(rows) == 1 else ", ".join(who), *row)
    return table


def _edges(edges: tuple[Edge, ...]) -> Table:
    table = _table("edges", "ranks", "latency ──►", "◄──", "bandwidth ──►", "◄──")
    by_ends = {(edge.source, edge.target): edge for edge in edges}
    for (a, b), there in by_ends.items():
        back = by_ends.get((b, a))
        if back is None or a > b:
            continue
        table.add_row(
            f"{a}, {b}",
            time_text(there.latency_s),
            time_text(back.latency_s),
            rate_text(there.bytes_per_s),
            rate_text(back.bytes_per_s),
        )
    return table


def _lines(report: Report) -> list[str]:
    lines = []
    slowest = report.slowest
    if slowest is not None:
        lines.append(
            f"slowest edge: rank {slowest.source} ──► rank {slowest.target}, "
            f"{rate_text(slowest.bytes_per_s)}, {time_text(slowest.latency_s)}"
        )
    if report.all_reduce is not None:
        took = report.all_reduce
        lines.append(
            f"all-reduce: {time_text(took.small_s)} for one number, {time_text(took.large_s)} for "
            f"{bytes_text(took.num_bytes)}"
        )
    if report.clocks_s:
        apart_s = max(report.clocks_s) - min(report.clocks_s)
        lines.append(f"clocks: within {time_text(apart_s)}")
    lines += [f"self-test: {test.text}" for test in report.self_tests]
    return lines


def _verdict(report: Report) -> str:
    counts = [
        (severity.value, sum(f.severity is severity for f in report.findings))
        for severity in (Severity.ERROR, Severity.WARNING)
    ]
    said = " and ".join(f"{n} {word}{'s' if n > 1 else ''}" for word, n in counts if n)
    match report.exit_code:
        case 0:
            return f"training can work{f', with {said}' if said else ''}"
        case 1:
            return f"training could not work: {said}"
        case _:
            return f"nothing was run: {said}"
