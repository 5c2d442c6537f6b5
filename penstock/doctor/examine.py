"""The examination, in its order: settings, mesh, edges, a step.  Stops where going on would only
hang.
"""

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from penstock.errors import PenstockError
from penstock.mesh import Mesh, init_mesh
from penstock.trace.units import bytes_text

from .edges import check_edges, measure_edges
from .facts import Host, RankFacts, gather_facts, this_host
from .finding import Finding, error, has_error, merged, softened, warning
from .report import Report
from .self_test import run_alone, run_together
from .settings import (
    Environment,
    Place,
    check_gloo,
    check_place,
    check_start,
    check_threads,
    check_together,
    gloo_address,
    read_place,
)

LITTLE_BYTES = 2**30
"""Less free space than this is worth a warning."""


def check_folders(runs: Path, temporary: Path) -> Iterator[Finding]:
    """Look at the folder of the runs, which need not exist yet, and at that of temporary files."""
    yield from check_folder(temporary, "temporary files", "Set TMPDIR to another folder")
    yield from check_folder(
        runs, "runs and checkpoints", "Start in another folder, or use --run-folder"
    )


def check_folder(folder: Path, purpose: str, change: str) -> Iterator[Finding]:
    """Write a file and remove it again, in `folder` or the nearest one above that exists."""
    place = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    what = f"the folder for {purpose}, {place}"
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"penstock")
    except OSError as failure:
        yield error(what, f"nothing can be written there ({failure.strerror})", change)
        return
    free_bytes = shutil.disk_usage(place).free
    if free_bytes < LITTLE_BYTES:
        yield warning(
            what,
            f"{bytes_text(free_bytes)} are free, which the first checkpoints may fill",
            f"Make room, or: {change[0].lower()}{change[1:]}",
        )


Show = Callable[[Report], None]
"""Writes a report; called once in every process."""


def examine(environment: Environment, timeout_s: float, show: Show) -> int:
    """Examine this process, or together with the others the job it is part of.

    Every wait for another process ends after `timeout_s` seconds at the latest.

    Returns:
        The exit code: 0 if training can work, 1 if it cannot, 2 if the job was started wrongly.
    """
    found = check_start(environment)
    if has_error(found):
        return _stop(found, show)
    place, host = read_place(environment), this_host()
    if place is None:
        return _examine_alone(environment, host, found, show)
    found += [
        *check_place(place, environment, host),
        *check_gloo(environment, host),
        *check_threads(environment, host),
    ]
    if has_error(found):
        return _stop(found, show, place)
    try:
        mesh = init_mesh(timeout_s=timeout_s)
    except (PenstockError, RuntimeError) as failure:
        return _stop([*found, _of(failure, "the processes make no mesh")], show, place)
    with mesh:
        found += _check_folders()
        mine = gather_facts(mesh.rank, gloo_address(environment, host), found)
        return _examine_job(mesh, mine, show)


def _stop(found: Sequence[Finding], show: Show, place: Place | None = None) -> int:
    """Say why this process cannot even meet the others."""
    rank, world_size = (place.rank, place.world_size) if place is not None else (0, 1)
    report = Report(rank=rank, world_size=world_size, findings=merged(found), stopped=True)
    show(report)
    return report.exit_code


def _examine_alone(environment: Environment, host: Host, found: list[Finding], show: Show) -> int:
    found += [*softened(check_gloo(environment, host)), *check_threads(environment, host)]
    mine = gather_facts(0, gloo_address(environment, host), [*found, *_check_folders()])
    found = [*mine.findings, *check_together([mine])]
    tests = []
    for device in ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]:
        test, wrong = run_alone(device)
        tests.append(test)
        found += wrong
    report = Report(
        rank=0, world_size=1, findings=merged(found), ranks=(mine,), self_tests=tuple(tests)
    )
    show(report)
    return report.exit_code


def _check_folders() -> list[Finding]:
    return list(check_folders(Path("runs"), Path(tempfile.gettempdir())))


def _examine_job(mesh: Mesh, mine: RankFacts, show: Show) -> int:
    """Go on with all processes; rank 0 says what they found, unless they lost each other."""
    found, measured = list(mine.findings), dict[str, Any]()
    broke_off = False
    try:
        with mesh.reporting():
            everyone = mesh.world.gather(mine.to_dict(), "for what the others run with")
            ranks = measured["ranks"] = tuple(map(RankFacts.from_dict, everyone))
            found = [*_findings(ranks), *check_together(ranks)]
            edges = measured["edges"] = measure_edges(mesh)
            found += check_edges(edges)
            test, wrong = run_together(mesh)
            measured["self_tests"] = (test,)
            found += wrong
    except (PenstockError, RuntimeError) as failure:
        found.append(_of(failure, "the job broke off"))
        broke_off = True
    report = Report(rank=mesh.rank, world_size=mesh.world_size, findings=merged(found), **measured)
    if mesh.is_first_rank:
        show(report)
    if not broke_off:  # torchrun ends all when one ends with an error, so rank 0 writes first
        mesh.world.barrier("for rank 0 to write the report")
    if not mesh.is_first_rank:
        show(replace(report, is_said=not broke_off))
    return report.exit_code


def _findings(ranks: Sequence[RankFacts]) -> list[Finding]:
    """Collect the findings of all ranks, each with the rank that has it."""
    return [replace(finding, ranks=(facts.rank,)) for facts in ranks for finding in facts.findings]


def _of(failure: Exception, what: str) -> Finding:
    """Make a finding of an error: of Penstock's, which says all by itself, or of torch's."""
    if isinstance(failure, PenstockError):
        return error(what, str(failure), "")
    reason = str(failure).strip().partition("\n")[0]
    return error(what, f"{type(failure).__name__}: {reason}", "See what the other ranks say")
