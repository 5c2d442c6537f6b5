"""`penstock simulate`: draw a schedule with unit costs, or predict a model's step on a cluster."""

import json
from collections.abc import Callable, Mapping
from fractions import Fraction
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from penstock.schedules.names import SCHEDULE_NAMES, named_schedule
from penstock.schedules.searched import searched
from penstock.trace.progress import say
from penstock.trace.units import count_text
from penstock.types import Recompute

from .layouts import layout_given, layout_options, simulate_layout
from .options import (
    COUNT,
    ScheduleName,
    given_options,
    html_option,
    require_torch,
    set_option,
    stages_per_rank_option,
)

if TYPE_CHECKING:
    from penstock.schedules.costs import Costs
    from penstock.schedules.ir import Schedule
    from penstock.trace.timeline import Timeline

_F = TypeVar("_F", bound=Callable[..., Any])
_MANY = 200_000
"""Instructions from which on a phase takes seconds, and is reported."""
_NAMES = (*SCHEDULE_NAMES, searched.__name__)
"""The families that can be drawn."""
_TO_READ = click.Path(dir_okay=False, exists=True, path_type=Path)
_TO_WRITE = click.Path(dir_okay=False, writable=True, path_type=Path)


def _exact(text: str) -> Fraction | int:
    """Read a number of units of time: 2, 0.5 or 1/3."""
    try:
        units = Fraction(text)
        float(units)
    except (ValueError, ZeroDivisionError):
        raise click.BadParameter(f"{text!r} is not a number such as 2, 0.5 or 1/3") from None
    except OverflowError:
        raise click.BadParameter(f"{text!r} is too large a number") from None
    return units.numerator if units.denominator == 1 else units  # ints are fast


def _cost_option(name: str, default: int, what: str) -> Callable[[_F], _F]:
    return click.option(
        f"--{name}",
        type=_exact,
        metavar="UNITS",
        default=str(default),
        show_default=True,
        help=f"Units of time that {what}.",
    )


class _Simulate(click.Command):
    """Takes `--recompute` alone too, wherever it stands."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        flag, words = "--recompute", [each.value for each in Recompute]
        pairs = zip(args, (*args[1:], ""), strict=False)
        whole = (f"{own}=stage" if own == flag and x not in words else own for own, x in pairs)
        return super().parse_args(ctx, [*whole])


@click.command(cls=_Simulate)
@click.argument("target", metavar="[TARGET]", required=False)
@set_option
@click.option("--schedule", type=ScheduleName(_NAMES), default="one_f_one_b", show_default=True)
@click.option("--num-stages", type=COUNT, default=4, show_default=True, help="K.")
@stages_per_rank_option
@click.option("--num-microbatches", type=COUNT, default=8, show_default=True, help="M.")
@click.option(
    "--window",
    type=COUNT,
    default=1,
    show_default=True,
    help="Mini-batches of M, one after the other without a flush, for pipedream, pipedream_2bw.",
)
@click.option(
    "--recompute",
    type=click.Choice([each.value for each in Recompute]),
    help="Run forwards a second time before their backwards; alone, it means stage.",
)
@click.option(
    "--width", type=click.IntRange(min=20), default=100, show_default=True, help="Columns."
)
@click.option("--csv", metavar="FILE", type=_TO_READ, help="Take the schedule from there.")
@click.option("--write-csv", metavar="FILE", type=_TO_WRITE, help="Write the schedule there.")
@html_option
@_cost_option("forward", 1, "a forward takes")
@_cost_option("backward-input", 1, "the part of a backward takes that gives gradients of inputs")
@_cost_option("backward-weight", 1, "the other part takes; a whole backward takes both")
@_cost_option("transfer", 0, "a message is on its way")
@click.option("--json", "as_json", is_flag=True, help="Write the timeline and its shares as JSON.")
@layout_options
def simulate(  # noqa: PLR0913 - one for each option
    target: str | None,
    overrides: tuple[str, ...],
    schedule: str,
    num_stages: int,
    stages_per_rank: int | None,
    num_microbatches: int,
    window: int,
    recompute: str | None,
    width: int,
    csv: Path | None,
    write_csv: Path | None,
    html: Path | None,
    as_json: bool,
    **rest: Any,
) -> None:
    """Draw when each stage does what, if a forward takes 1 and a backward 2 units of time.

    Families that are filled for costs, such as zb_h1 and searched, are made for these.

    With TARGET, a recipe or package.module:function as `penstock check` takes it, its layers are
    measured here, and the time is in seconds; messages take none.  Stages, micro-batches and
    schedule are then the target's, unless an option gives them.

    With --cluster, the step of TARGET in a layout is predicted on devices that need not be here:
    its seconds, tokens a second, MFU, bubble, messages, memory and stages.

    If a micro-batch would be narrower than a column, a summary is written instead. CSV files
    are those of torch.distributed.pipelining: a line for each rank, a cell for each action.

    \b
    Examples:
      penstock simulate --schedule one_f_one_b --num-stages 4 --num-microbatches 8
      penstock simulate --schedule interleaved_1f1b --num-stages 8 --stages-per-rank 2
      penstock simulate --csv mine.csv --forward 2 --transfer 1/4
      penstock simulate mymodel:example --num-stages 2 --schedule gpipe
      penstock simulate --schedule zb_h1 --html zb_h1.html
      penstock simulate mymodel:example --cluster '2 x dgx-h100' --tensor 4 --pipeline 2
    """
    from penstock.schedules.passes import add_recompute
    from penstock.schedules.torch_csv import read_csv
    from penstock.simulator import simulate as predict

    # 1. Predict a layout on a cluster, or make or read the schedule.
    values = click.get_current_context().params
    layout = layout_given(target, values)
    if layout is not None:
        simulate_layout(str(target), layout, values)
        return
    costs = _costs(rest)
    if target is not None or overrides:
        program, costs = _of_target(target, overrides, window)
    elif csv is None:
        family = named_schedule(schedule, num_stages, stages_per_rank, costs)
        size = num_stages * num_microbatches * window
        _say(f"making the schedule of {count_text(num_stages, 'stage')}", size * 6)
        program = family(num_stages, num_microbatches, window)
    else:
        _refuse_beside_csv(
            "schedule", "num_stages", "stages_per_rank", "num_microbatches", "window"
        )
        program = read_csv(csv)
    # 2. Write it, if that is asked for.
    if write_csv is not None:
        _write_csv(program, write_csv)
    # 3. Simulate, and print JSON, a grid, or a summary of what is too long to draw.
    _say("simulating its instructions", sum(map(len, program.programs)))
    program = add_recompute(program) if recompute == Recompute.STAGE.value else program
    timeline = predict(program, costs)
    _say("adding up where the time goes", len(timeline.spans))
    if html is not None:
        source = schedule if csv is None else csv.name
        measured = f"{target}, " if target else ""
        _write_page(timeline, html, f"{measured}{source}", () if target else (_UNIT_NOTE,))
    if as_json:
        breakdown = json.loads(timeline.breakdown().to_json())
        click.echo(
            json.dumps({"breakdown": breakdown, "timeline": json.loads(timeline.to_json())})
        )
    else:
        click.echo(_drawn(timeline, width, in_units=target is None))


def _drawn(timeline: "Timeline", width: int, *, in_units: bool) -> str:
    """Return the grid of a timeline; of one in units of time, a summary where it is too wide."""
    from penstock.trace.grid import render_grid

    if not in_units:
        return render_grid(timeline, width)
    if timeline.step_s <= width - len(f"rank {timeline.num_ranks} ||"):  # a column for each unit
        return render_grid(timeline, width, text_of=_number)
    return _summary(timeline)


def _of_target(
    name: str | None, overrides: tuple[str, ...], window: int
) -> "tuple[Schedule, Costs]":
    """Return the schedule of a target, and the measured costs of its stages."""
    if name is None:
        raise click.UsageError(f"--set {overrides[0]} changes a recipe; give one as TARGET")
    if beside := given_options("csv", "forward", "backward_input", "backward_weight", "transfer"):
        raise click.UsageError(f"the layers of {name} say that; leave out {beside[0]}")
    say(f"loading PyTorch, to measure {name}")
    require_torch()
    from .targets import load_target, measured_schedule

    asked = ("num_stages", "stages_per_rank", "num_microbatches", "schedule")
    values = click.get_current_context().params
    options = {key: values[key] for key in asked if given_options(key)}
    return measured_schedule(load_target(name, overrides, options), window)


def _refuse_beside_csv(*names: str) -> None:
    if beside := given_options(*names):
        raise click.UsageError(f"the file of --csv says that itself; leave out {beside[0]}")


def _write_csv(program: "Schedule", path: Path) -> None:
    """Write a schedule; a click.UsageError if the file cannot be written."""
    from penstock.schedules.torch_csv import to_csv

    try:
        path.write_text(to_csv(program), encoding="utf-8")
    except OSError as error:
        raise click.UsageError(f"--write-csv {path}: {error.strerror}") from None


def _write_page(timeline: "Timeline", html: Path, source: str, notes: tuple[str, ...]) -> None:
    """Write the page of a simulated step; `source` says of which schedule, in its title."""
    from penstock.trace.page import Page, Step, with_step, write_page

    counts = count_text(timeline.schedule.num_microbatches, "micro-batch")
    subtitle = f"{count_text(timeline.num_ranks, 'rank')}, {counts}"
    page = Page(f"{source}, simulated", subtitle, notes=notes)
    write_page(with_step(page, Step(predicted=timeline)), html)


_UNIT_NOTE = "A unit of time is shown as 1 s."


def _costs(units: Mapping[str, Fraction | int]) -> "Costs":
    from penstock.schedules.costs import Costs

    backward = units["backward_input"], units["backward_weight"]
    return Costs(
        forward_s=units["forward"],
        backward_s=sum(backward),
        recompute_s=units["forward"],
        transfer_s=units["transfer"],
        backward_input_s=backward[0],
        backward_weight_s=backward[1],
    )


def _say(work: str, num_instructions: int) -> None:
    """Report `work` if it has so many instructions that it takes seconds."""
    if num_instructions >= _MANY:
        say(work)


def _summary(timeline: "Timeline") -> str:
    """Return the main numbers of a timeline in short lines, instead of a grid."""
    from penstock.trace.units import percent_text

    breakdown = timeline.breakdown()
    return "\n".join(
        (
            f"step    {_number(breakdown.step_s)} units of time",
            f"bubble  {percent_text(breakdown.bubble)}",
            f"ranks   {breakdown.num_ranks:,}",
            f"micro-batches  {breakdown.num_microbatches:,}",
            "Too long to draw here:",
            f"--width {ceil(breakdown.step_s)}, or --json",
        )
    )


def _number(units: float) -> str:
    """Write a whole number as one, any other with three digits after the point."""
    return f"{int(units):,}" if units == int(units) else f"{float(units):,.3f}"
