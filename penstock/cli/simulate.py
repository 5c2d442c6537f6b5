"""`penstock simulate`: draw a schedule with unit costs, without tensors."""

import json

import click

from penstock.schedules.names import SCHEDULE_NAMES, named_schedule

from .options import stages_per_rank_option


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
    program = function(num_stages, num_microbatches)
    timeline = foretell(add_recompute(program) if recompute else program, UNIT_COSTS)
    if as_json:
        breakdown = json.loads(timeline.breakdown().to_json())
        click.echo(
            json.dumps({"breakdown": breakdown, "timeline": json.loads(timeline.to_json())})
        )
    else:
        click.echo(render_grid(timeline, width))
