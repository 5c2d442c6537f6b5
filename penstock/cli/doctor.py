"""`penstock doctor`: can this job train at all, and how fast are its links?"""

import os
from typing import TYPE_CHECKING

import click

from penstock.types import LONGEST_TIMEOUT_S

from .options import num_processes_option, refuse_inside_torchrun, require_torch

if TYPE_CHECKING:
    from penstock.doctor import Report


@click.command()
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=1, max=LONGEST_TIMEOUT_S),
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="Deadline of every wait for another process; at least 1.",
)
@num_processes_option
@click.option("--json", "as_json", is_flag=True, help="Write the report as one line of JSON.")
def doctor(timeout_s: float, num_processes: int | None, as_json: bool) -> int:
    """Examine a job before it runs: settings, versions, devices, links, and a step of training.

    Alone it examines this machine and compares a tiny pipeline with the unsplit model.  Under
    torchrun all processes meet, measure the links between them and train one step together; rank 0
    writes the report.  Start it as the training will be started.

    Exit code 0: training can work.  1: it ran, and training could not work.  2: it was started
    wrongly, and nothing was run.

    \b
    Examples:
      penstock doctor
      penstock doctor --num-processes 2
      torchrun --nproc-per-node 4 -m penstock doctor --timeout 20
    """
    if num_processes is not None:
        from .launch import launch

        refuse_inside_torchrun()
        words = ["doctor", "--timeout", str(timeout_s), *(["--json"] if as_json else [])]
        return launch(num_processes, 0, words)
    require_torch()
    from penstock.doctor import examine

    return examine(os.environ, timeout_s, lambda report: _write(report, as_json))


def _write(report: "Report", as_json: bool) -> None:
    """Write the report on rank 0; elsewhere, the findings that rank 0 cannot write."""
    from penstock.doctor.show import show_report

    if report.rank == 0 and as_json:
        click.echo(report.to_json())
    elif report.rank == 0 and report.ranks:
        show_report(report)
    if report.is_said and report.exit_code:
        click.echo(f"penstock: rank {report.rank} ends with what rank 0 found", err=True)
    elif not report.is_said and (report.rank or not report.ranks):
        who = f"rank {report.rank}: " if report.world_size > 1 else ""
        for finding in report.findings:
            click.echo(f"penstock: {who}{finding.severity.value}: {finding}", err=True)
