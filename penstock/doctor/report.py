"""All that the doctor found, as one value: as JSON for machines, as tables for people."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from pydantic import TypeAdapter
from rich.console import Console

from penstock.trace.units import bytes_text, columns, time_text

from .edges import Edge, rate_text
from .facts import RankFacts
from .finding import Finding, Severity, has_error
from .self_test import SelfTest


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What one process found; rank 0 of a job has what all found.

    `stopped` tells that the job was started wrongly, so that nothing could be run; `is_said`, that
    rank 0 has written this already.
    """

    rank: int
    world_size: int
    findings: tuple[Finding, ...]
    ranks: tuple[RankFacts, ...] = ()
    edges: tuple[Edge, ...] = ()
    self_tests: tuple[SelfTest, ...] = ()
    stopped: bool = False
    is_said: bool = False

    @property
    def exit_code(self) -> int:
        """0: training can work; 1: it ran, and something is wrong; 2: it was started wrongly."""
        if self.stopped:
            return 2
        return 1 if has_error(self.findings) else 0

    @property
    def slowest(self) -> Edge | None:
        """The edge with the least bandwidth."""
        return min(self.edges, key=lambda edge: edge.bytes_per_s, default=None)

    def to_json(self) -> str:
        """Write it all as one line of JSON; times in seconds, sizes in bytes."""
        hidden = {"findings"}  # they are among those of the report
        found = TypeAdapter(Report).dump_python(
            self, mode="json", exclude={"ranks": {"__all__": hidden}}
        )
        slowest = None if self.slowest is None else [self.slowest.source, self.slowest.target]
        return json.dumps(found | {"slowest": slowest, "exit_code": self.exit_code})


_COLORS = {Severity.ERROR: "bold red", Severity.WARNING: "yellow", Severity.INFO: "cyan"}


def show_report(report: Report) -> None:
    """Write everything to stdout."""
    console = Console(highlight=False)
    for line in _lines(report):
        console.print(line, soft_wrap=True, markup=False)
    for finding in report.findings:
        show_finding(console, finding)
    console.print(_verdict(report), soft_wrap=True, markup=False)


def show_finding(console: Console, finding: Finding) -> None:
    """Write one line."""
    console.print(f"{finding.severity.value:7} ", style=_COLORS[finding.severity], end="")
    console.print(str(finding), soft_wrap=True, markup=False)


def _processes(ranks: tuple[RankFacts, ...]) -> Iterator[tuple[str, ...]]:
    yield "rank", "host", "address", "cores", "threads", "memory", "devices"
    for facts in ranks:
        yield (
            str(facts.rank),
            facts.host,
            facts.address,
            str(len(facts.cores)),
            str(facts.num_threads),
            bytes_text(facts.memory_bytes),
            _devices(facts),
        )


def _devices(facts: RankFacts) -> str:
    gpus = [f"{gpu.name} ({bytes_text(gpu.memory_bytes)})" for gpu in facts.gpus]
    counted = [(name, len(list(group))) for name, group in groupby(gpus)]
    return ", ".join(["CPU", *(f"{n} x {name}" if n > 1 else name for name, n in counted)])


def _versions(ranks: tuple[RankFacts, ...]) -> Iterator[tuple[str, ...]]:
    yield "ranks", "Python", "torch", "built for", "Penstock", "safetensors"
    rows: dict[tuple[str, ...], list[str]] = {}
    for facts in ranks:
        versions = (facts.python, facts.torch, facts.torch_build, facts.penstock)
        rows.setdefault((*versions, facts.safetensors), []).append(str(facts.rank))
    for row, who in rows.items():
        yield "all" if len(rows) == 1 else ", ".join(who), *row


def _edges(edges: tuple[Edge, ...]) -> Iterator[tuple[str, ...]]:
    yield "ranks", "latency ──►", "◄──", "bandwidth ──►", "◄──"
    by_ends = {(edge.source, edge.target): edge for edge in edges}
    for (a, b), there in by_ends.items():
        back = by_ends.get((b, a))
        if back is not None and a < b:
            latencies = time_text(there.latency_s), time_text(back.latency_s)
            rates = rate_text(there.bytes_per_s), rate_text(back.bytes_per_s)
            yield f"{a}, {b}", *latencies, *rates


def _lines(report: Report) -> Iterator[str]:
    """Yield the tables and what else was measured."""
    if report.ranks:
        yield from (*columns(list(_processes(report.ranks))), "")
        yield from (*columns(list(_versions(report.ranks)), num_left=6), "")
    if report.edges:
        yield from (*columns(list(_edges(report.edges)), num_left=1), "")
    slowest = report.slowest
    if slowest is not None:
        yield (
            f"slowest edge: rank {slowest.source} ──► rank {slowest.target}, "
            f"{rate_text(slowest.bytes_per_s)}, {time_text(slowest.latency_s)}"
        )
    yield from (f"self-test: {test.text}" for test in report.self_tests)


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
