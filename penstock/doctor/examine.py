"""Examine settings, mesh, edges and a step, in this order.

Stops if further checks would only hang.
"""

import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from penstock.equality import CheckReport, check
from penstock.errors import PenstockError
from penstock.mesh import Mesh, init_mesh
from penstock.trace.units import bytes_text, columns, count_text, time_text

from .facts import RankFacts, gather_facts
from .findings import (
    Environment,
    Finding,
    bits_text,
    check_edges,
    check_network,
    check_together,
    measure_edges,
)

_FAILURES = (PenstockError, RuntimeError)
"""Errors that become findings."""
_WIDTH = 16
"""Features of the self-test's layers."""
_BATCH = 14
"""Samples of its mini-batch."""
_NUM_MICROBATCHES = 4
"""Micro-batches of it, uneven ones."""
_CLOSE = 1e-4
"""Relative difference of tensors up to which they differ by rounding."""


@dataclass(slots=True)
class Report:
    """The findings of one process; on rank 0 of a job, those of all.

    `stopped`: the job could not start.  `broke_off`: a process was lost, so that each reports
    alone.
    """

    rank: int = 0
    lines: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    stopped: bool = False
    broke_off: bool = False

    @property
    def exit_code(self) -> int:
        """0: training can work; 1: it ran, with errors; 2: it was started wrongly."""
        if self.stopped:
            return 2
        return int(any(finding.is_error for finding in self.findings))

    @property
    def verdict(self) -> str:
        """The last line of the report."""
        return f"training {'could not' if self.exit_code else 'can'} work"


Show = Callable[[Report], None]
"""A function that prints a report; called once in every process."""


def examine(environment: Environment, timeout_s: float, show: Show) -> int:
    """Examine this process, or its job together with the other processes; return the exit code.

    Every wait for another process ends after `timeout_s` seconds at the latest.
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
    """Examine this process alone, with a self-test on each of its devices."""
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
    """Continue with all processes; all have the same findings, unless a process is lost."""
    try:
        with mesh.reporting():
            ranks = mesh.world.gather(gather_facts(mesh.rank), "for what the others run with")
            report.lines += _tables(ranks)
            report.findings += check_together(ranks)
            edges = measure_edges(mesh)
            rows = [("ranks", "latency", "bandwidth")]
            for edge in edges:
                ends = f"{edge.source} ──► {edge.target}"
                rows.append((ends, time_text(edge.latency_s), bits_text(edge.bytes_per_s)))
            report.lines += [*columns(rows, num_left=1), ""]
            report.findings += check_edges(edges)
            where = count_text(len(ranks), "process")
            text, wrong = self_test(where, mesh.num_stages, mesh=mesh)
            report.lines.append(f"self-test: {text}")
            report.findings += wrong
    except _FAILURES as failure:
        report.findings.append(_of(failure))
        report.broke_off = True
    show(report)
    if not report.broke_off:  # rank 0 writes first: torchrun ends all once one ends in an error
        mesh.world.barrier("for rank 0 to write the report")


def self_test(where: str, num_stages: int, **options: Mesh | str) -> tuple[str, list[Finding]]:
    """Check a step of two layers per stage, with BatchNorm and dropout, to the bit.

    `options` are a `mesh`, or `devices`, of `Pipeline`.  All ranks of a mesh return the same.
    """
    # 1. Make layers that show a wrong order: BatchNorm, dropout, and an uneven batch.
    layers: list[nn.Module] = []
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        for _ in range(num_stages):
            layers.append(nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.BatchNorm1d(_WIDTH)))
            layers.append(nn.Sequential(nn.Tanh(), nn.Dropout(0.1)))
        inputs, targets = torch.randn(2, _BATCH, _WIDTH)
    options_of_check: dict[str, Any] = {
        "loss": nn.functional.mse_loss,
        "num_microbatches": _NUM_MICROBATCHES,
    }
    options_of_check |= {"partition": [2] * num_stages, "threads_per_stage": 1, **options}
    # 2. Compare a step of the pipeline with the unsplit model.
    try:
        report: CheckReport | Exception = check(layers, inputs, targets, **options_of_check)
    except Exception as failure:  # a torch that does not fit the machine may raise any
        if "mesh" in options:
            raise  # so that the other processes learn of it
        report = failure
    return judge(where, report, is_job="mesh" in options)


def judge(
    where: str, report: CheckReport | Exception, *, is_job: bool
) -> tuple[str, list[Finding]]:
    """Return the verdict and its findings; in a job, rounding is no error."""
    if isinstance(report, Exception):
        reason = str(report).strip().partition("\n")[0]
        text = f"{where}: FAILED: {type(report).__name__}: {reason}"
    else:
        text = f"{where}: {report.verdict}"
        if report.equal:
            return text, []
        if is_job and report.most <= _CLOSE:
            why = "processors of several kinds round differently; use equal ones where bits count"
            return text, [Finding(False, f"the self-test: {text}: {why}")]
    remedy = "See that this build of torch fits the machine, and report this with the output of"
    return text, [Finding(True, f"the self-test: {text}. {remedy} penstock doctor")]


def _of(failure: Exception) -> Finding:
    """Return the finding of an error: Penstock's text as it is, torch's first line."""
    if isinstance(failure, PenstockError):
        return Finding(True, str(failure))
    return Finding(True, f"{type(failure).__name__}: {str(failure).strip().partition(chr(10))[0]}")


def _tables(ranks: Sequence[RankFacts]) -> Iterator[str]:
    """Yield the versions, and a table of the processes and their resources."""
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
