"""`penstock doctor`: can this job train at all, and how fast are its links?"""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from penstock.types import LONGEST_TIMEOUT_S

from .options import FILE, launch, num_processes_option, refuse_inside_torchrun, require_torch

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
@click.option("--json", "as_json", is_flag=True, help="Write JSON, such as an issue needs.")
@click.option(
    "--calibrate",
    is_flag=True,
    help="Measure this machine's devices and links instead, as a cluster that plans are made for, "
    "and keep the figures for jobs of --num-processes.  Compare cards with their presets.",
)
@click.option(
    "--save",
    type=FILE,
    metavar="FILE",
    help="With --calibrate: write the cluster as TOML.",
)
@click.option(
    "--budget",
    "budget_s",
    type=click.FloatRange(min=1),
    default=16.0,
    show_default=True,
    metavar="SECONDS",
    help="With --calibrate: about how long to measure, and as long again for each kind of card.",
)
def doctor(num_processes: int | None, calibrate: bool, **options: Any) -> int:
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
      penstock doctor --calibrate --save cluster.toml
      penstock doctor --calibrate --num-processes 2
    """
    # 1. Calibrate instead, alone.
    as_json, timeout_s = options["as_json"], options["timeout_s"]
    if calibrate:
        if "WORLD_SIZE" in os.environ:
            raise click.UsageError(
                "--calibrate measures a machine from one process: start it without torchrun; "
                "--num-processes N says for which jobs the figures are kept"
            )
        return _calibrate(num_processes, options["budget_s"], options["save"], as_json)
    # 2. Refuse options of --calibrate without it.
    if options["save"] is not None:
        raise click.UsageError("--save is for --calibrate: give both, or neither")
    if num_processes is not None:
        # 3. Start the processes; each of them runs this command.
        refuse_inside_torchrun()
        told = ["doctor", "--timeout", str(timeout_s), *(("--json",) if as_json else ())]
        return launch(num_processes, 0, told)
    require_torch()
    from penstock.doctor import examine

    return examine(os.environ, timeout_s, _write_json if as_json else _write)


def _calibrate(
    num_processes: int | None, budget_s: float, save: Path | None, as_json: bool
) -> int:
    """Measure this machine, print its figures, keep them for later jobs and save its cluster."""
    if num_processes is not None:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # the figures are of such a job
    require_torch()
    from penstock.doctor.calibration import calibrate
    from penstock.doctor.calibration.card import compared_cards, compared_lines
    from penstock.doctor.calibration.figures import as_line, calibration_lines, comment_of
    from penstock.doctor.calibration.remembered import keep

    # 1. Measure.
    if save is not None:
        _refuse_unwritable(save)  # before anything is measured
    calibration = calibrate(budget_s)
    cluster = keep(calibration, num_processes or 1)
    if save is not None:
        cluster.save(save, comment_of(calibration))
    cards = compared_cards(budget_s)
    # 2. Print: one line of JSON, or tables and a warning.
    if as_json:
        click.echo(as_line(calibration, cards))
        return 0
    of_cards = (line for own in cards.items() for line in ("", *compared_lines(*own)))
    lines = (*calibration_lines(calibration.figures), "", *str(cluster).splitlines(), *of_cards)
    for line in lines:
        click.echo(line)
    if calibration.warning:
        click.echo(f"penstock: warning: {calibration.warning}", err=True)
    if save is not None:
        click.echo(f"written to {save}")
    return 0


def _refuse_unwritable(path: Path) -> None:
    """Check that a file can be written; leave none behind."""
    is_new = not path.exists()
    try:
        path.open("a").close()
    except OSError as error:
        raise click.UsageError(f"--save {path}: it cannot be written: {error.strerror}") from None
    if is_new:
        path.unlink()


def _write_json(report: "Report") -> None:
    """Print the report as JSON, on rank 0 or on every rank if the job was broken off."""
    if report.rank == 0 or report.stopped or report.broke_off:
        found = [{"error": own.is_error, "text": own.text} for own in report.findings]
        facts = {"rank": report.rank, "verdict": report.verdict, "findings": found}
        click.echo(json.dumps({**facts, "report": report.lines}, indent=1))


def _write(report: "Report") -> None:
    """Print the report on rank 0; print the findings on every rank if the job was broken off."""
    if report.rank == 0 and not report.stopped:
        for line in (*report.lines, *map(str, report.findings), report.verdict):
            click.echo(line)
    elif report.stopped or report.broke_off:
        for finding in report.findings:
            click.echo(f"penstock: rank {report.rank}: {finding}", err=True)
