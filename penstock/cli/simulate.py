"""`penstock simulate`: draw a schedule with unit costs, without tensors."""

import json
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import click

from penstock.schedules.names import SCHEDULE_NAMES, named_schedule
from penstock.trace.progress import say

from .options import stages_per_rank_option

if TYPE_CHECKING:
    from penstock.schedules.walk import Run
    from penstock.trace.timeline import Timeline

_MANY = 200_000
"""Instructions from which on it takes seconds, and what is being done is said."""


@click.command()
@click.option("--schedule", type=click.Choice(SCHEDULE_NAMES), default="gpipe", show_default=True)
@click.option("--num-stages", type=click.IntRange(min=1), default=4, show_default=True, help="K.")
@stages_per_rank_option
@click.option(
    "--num-microbatches", type=click.IntRange(min=1), default=8, show_default=True, help="M."
)
@click.option(
    "--recompute", is_flag=True, help="Run every forward a second time before its backward."
)
@click.option(
    "--width", type=click.IntRange(min=20), default=100, show_default=True, help="Columns."
)
@click.option("--json", "as_json", is_flag=True, help="Write the timeline and its shares as JSON.")
def simulate(  # noqa: PLR0913 - one for each option
    schedule: str,
    num_stages: int,
    stages_per_rank: int | None,
    num_microbatches: int,
    recompute: bool,
    width: int,
    as_json: bool,
) -> None:
    """Draw when each stage does what, if a forward takes 1 and a backward 2 units of time.

    Where a micro-batch would be narrower than a column, a summary is written instead.

    \b
    Examples:
      penstock simulate --schedule one_f_one_b --num-stages 4 --num-microbatches 8
      penstock simulate --schedule interleaved_1f1b --num-stages 8 --stages-per-rank 2
    """
    from penstock.schedules.passes import add_recompute
    from penstock.simulator import UNIT_COSTS
    from penstock.simulator import simulate as foretell
    from penstock.trace.grid import render_grid

    function = named_schedule(schedule, num_stages, stages_per_rank or 1)
    _say(f"making the schedule of {num_stages} stages", num_stages * num_microbatches * 6)
    program = function(num_stages, num_microbatches)
    timeline = foretell(add_recompute(program) if recompute else program, UNIT_COSTS, _watched)
    _say("adding up where the time goes", len(timeline.spans))
    if as_json:
        breakdown = json.loads(timeline.breakdown().to_json())
        click.echo(
            json.dumps({"breakdown": breakdown, "timeline": json.loads(timeline.to_json())})
        )
    elif _can_be_read(timeline, width):
        click.echo(render_grid(timeline, width))
    else:
        click.echo(_summary(timeline))


def _say(what: str, num_instructions: int) -> None:
    """Say on a terminal what is being done, if it takes long."""
    if num_instructions >= _MANY:
        say(what)


def _watched(runs: "Iterable[Run]", number: int) -> "Iterable[Run]":
    """Show a bar on a terminal, if it takes long."""
    if number < _MANY or not sys.stderr.isatty():
        return runs
    return _with_bar(runs, number)


def _with_bar(runs: "Iterable[Run]", number: int) -> "Iterator[Run]":
    label = f"simulating {number:,} instructions"
    with click.progressbar(
        length=number, label=label, file=sys.stderr, update_min_steps=number // 100
    ) as bar:
        for rank, start, stop in runs:
            yield rank, start, stop
            bar.update(stop - start)


def _can_be_read(timeline: "Timeline", width: int) -> bool:
    """Tell whether a unit of time is at least as wide as a column."""
    return timeline.step_s <= width - len(f"rank {timeline.num_ranks} ||")


def _summary(timeline: "Timeline") -> str:
    """Say in short lines what a picture would show."""
    from penstock.trace.units import percent_text

    breakdown = timeline.breakdown()
    return "\n".join(
        (
            f"step    {breakdown.step_s:,} units of time",
            f"bubble  {percent_text(breakdown.bubble)}",
            f"ranks   {breakdown.num_ranks:,}",
            f"micro-batches  {breakdown.num_microbatches:,}",
            "Too long to draw here:",
            f"--width {breakdown.step_s}, or --json",
        )
    )
