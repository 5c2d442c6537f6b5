"""The examination, in its order: settings, mesh, edges, a step.  Stops where going on would only
hang.
"""

import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from penstock.errors import PenstockError
from penstock.mesh import Mesh, init_mesh
from penstock.trace.units import bytes_text, columns, count_text, time_text

from .edges import Edge, check_edges, measure_edges, rate_text
from .facts import RankFacts, gather_facts
from .self_test import self_test
from .settings import Environment, Finding, check_network, check_together

_FAILURES = (PenstockError, RuntimeError)


@dataclass(slots=True)
class Report:
    """What one process found; rank 0 of a job has what all found.

    `stopped` tells that nothing could be run; `broke_off`, that a process was lost on the way, so
    that each speaks for itself.
    """

    rank: int = 0
    lines: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    stopped: bool = False
    broke_off: bool = False

    @property
    def exit_code(self) -> int:
        """0: training can work; 1: it ran, and something is wrong; 2: it was started wrongly."""
        if self.stopped:
            return 2
        return int(any(finding.is_error for finding in self.findings))

    @property
    def verdict(self) -> str:
        """The last line."""
        return f"training {'could not' if self.exit_code else 'can'} work"


Show = Callable[[Report], None]
"""Writes a report; called once in every process."""


def examine(environment: Environment, timeout_s: float, show: Show) -> int:
    """Examine this process, or together with the others the job it is part of.

    Every wait for another process ends after `timeout_s` seconds at the latest.  Returns the exit
    code.
    """
    if environment.get("WORLD_SIZE", "1") == "1":
        report = _examine_alone(environment)
        show(report)
        return report.exit_code
    name = environment.get("RANK", "")
    report = Report(int(name) if name.isdigit() else 0)
    report.findings += check_network(environment, socket.gethostname())
    try:
        if report.exit_code == 0:
            with init_mesh(timeout_s=timeout_s) as mesh:
                _examine_job(mesh, report, show)
            return report.exit_code
    except _FAILURES as failure:
        report.findings.append(_of(failure))
    report.stopped = True
    show(report)
    return report.exit_code


def _examine_alone(environment: Environment) -> Report:
    report, mine = Report(), gather_facts(0)
    if environment.get("RANK") and "WORLD_SIZE" not in environment:
        why = "without WORLD_SIZE each process takes itself for the only one, and trains alone"
        report.findings.append(
            Finding(True, f"RANK is set, but WORLD_SIZE is not: {why}. Start them with torchrun")
        )
    report.findings += check_together([mine])
    report.lines += _tables([mine])
    for device in ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]:
        text, wrong = self_test(device, 2, devices=device)
        report.lines.append(f"self-test: {text}")
        report.findings += wrong
    return report


def _examine_job(mesh: Mesh, report: Report, show: Show) -> None:
    """Go on with all processes; all of them have the findings, unless they lost each other."""
    try:
        with mesh.reporting():
            ranks = mesh.world.gather(gather_facts(mesh.rank), "for what the others run with")
            report.lines += _tables(ranks)
            report.findings += check_together(ranks)
            edges = measure_edges(mesh)
            report.lines += [*columns(list(_edges(edges)), num_left=1), ""]
            report.findings += check_edges(edges)
            where = count_text(len(ranks), "process")
            text, wrong = self_test(where, mesh.num_stages, mesh=mesh)
            report.lines.append(f"self-test: {text}")
            report.findings += wrong
    except _FAILURES as failure:
        report.findings.append(_of(failure))
        report.broke_off = True
    show(report)
    if not report.broke_off:  # torchrun ends all when one ends with an error, so rank 0 is first
        mesh.world.barrier("for rank 0 to write the report")


def _of(failure: Exception) -> Finding:
    """Make a finding of an error: of Penstock's, which says all by itself, or of torch's."""
    if isinstance(failure, PenstockError):
        return Finding(True, str(failure))
    return Finding(True, f"{type(failure).__name__}: {str(failure).strip().partition(chr(10))[0]}")


def _tables(ranks: Sequence[RankFacts]) -> Iterator[str]:
    first = ranks[0]
    yield (
        f"Penstock {first.penstock}, Python {first.python}, torch {first.torch} built for "
        f"{first.torch_build}, safetensors {first.safetensors}"
    )
    yield ""
    rows = [("rank", "host", "cores", "threads", "memory", "GPUs")]
    for facts in ranks:
        cores, threads = str(len(facts.cores)), str(facts.num_threads)
        gpus = [f"{gpu.name} ({bytes_text(gpu.memory_bytes)})" for gpu in facts.gpus]
        memory = bytes_text(facts.memory_bytes)
        rows.append(
            (str(facts.rank), facts.host, cores, threads, memory, ", ".join(gpus) or "none")
        )
    yield from (*columns(rows), "")


def _edges(edges: Sequence[Edge]) -> Iterator[tuple[str, str, str]]:
    yield "ranks", "latency", "bandwidth"
    for edge in edges:
        ends = f"{edge.source} ──► {edge.target}"
        yield ends, time_text(edge.latency_s), rate_text(edge.bytes_per_s)
