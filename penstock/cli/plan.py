"""`penstock plan`: how to run a model on a cluster."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from penstock.errors import PlanError
from penstock.schedules.names import SCHEDULE_NAMES
from penstock.trace.progress import say
from penstock.trace.units import count_text

from .layouts import compare_layouts
from .options import (
    COUNT,
    FILE,
    ScheduleName,
    batch_size_option,
    given_options,
    html_option,
    require_torch,
    set_option,
    sharding_option,
)

if TYPE_CHECKING:
    from penstock.planner.placement import Placement
    from penstock.trace.timeline import Timeline


@click.command()
@click.argument("target_name", metavar="TARGET", required=False)
@set_option
@click.option(
    "--cluster",
    "cluster_name",
    metavar="NAME_OR_FILE",
    required=True,
    help="What to plan for: p3.16xlarge, '4 x dgx-h100', a device such as h100 (a host of one), "
    "or a TOML file; of this machine, "
    "`penstock doctor --calibrate --save` writes one.",
)
@click.option(
    "--profile",
    "profiles",
    metavar="FILE",
    type=FILE,
    multiple=True,
    help="Take what the layers cost from there instead of from TARGET; several: one model, "
    "measured with several numbers of threads.",
)
@batch_size_option
@click.option(
    "--microbatch-size",
    "sizes",
    metavar="N",
    type=COUNT,
    multiple=True,
    help="Samples for which TARGET's layers are profiled.  [default: a few up to the batch]",
)
@click.option(
    "--compare",
    metavar="FILE.toml",
    type=click.Path(dir_okay=False, exists=True, path_type=Path),
    help="Choose nothing, but price the layouts of this file: a table for each, such as [mine] "
    "with tensor = 2 and pipeline = 4, the keys of penstock.Parallelism.",
)
@click.option("--num-ranks", type=COUNT, help="Devices of one replica.")
@click.option("--num-replicas", type=COUNT, help="D.")
@click.option("--num-microbatches", type=COUNT, help="M, of each replica.")
@sharding_option
@click.option(
    "--measure",
    is_flag=True,
    help="Run the layers of TARGET's model first, here, on an accelerator of the cluster's kind, "
    "and let them count as measured.  [default: the target's]",
)
@click.option(
    "--schedule",
    "schedules",
    type=ScheduleName(SCHEDULE_NAMES),
    multiple=True,
    help="Only these.  [default: all]",
)
@click.option(
    "--memory-share",
    type=click.FloatRange(min=0, max=1, min_open=True),
    default=0.9,
    show_default=True,
    help="Of a device's memory, what may be used: allocators need the rest.",
)
@click.option("--no-offload", is_flag=True, help="Move nothing to the memory of hosts.")
@click.option("--best", type=COUNT, default=5, show_default=True, help="Rows of the table.")
@click.option(
    "--save",
    metavar="FILE.json",
    type=FILE,
    help="Write the plan there, and its timeline beside it (FILE.predicted.json), which the "
    "report of a run with --plan FILE.json shows above the measured one.",
)
@html_option
@click.option("--json", "as_json", is_flag=True, help="Write the plan as JSON, and no table.")
def plan(  # noqa: PLR0913 - one for each option
    target_name: str | None,
    overrides: tuple[str, ...],
    cluster_name: str,
    profiles: tuple[Path, ...],
    compare: Path | None,
    batch_size: int | None,
    sizes: tuple[int, ...],
    best: int,
    save: Path | None,
    html: Path | None,
    as_json: bool,
    sharding: str | None,
    measure: bool,
    **decided: Any,
) -> None:
    """Choose how to run TARGET's model on a cluster: what takes the least time, and fits.

    Stages, replicas, micro-batches, the schedule, the layers of each stage, what is recomputed or
    moved away: everything that was predicted is priced by the simulator, the unsplit model too.
    Layers are counted for accelerators and measured for the cores of this machine; a profile that
    was saved needs neither TARGET nor PyTorch.  TARGET is package.module:function, as `penstock
    check` takes it, or a recipe.

    \b
    Examples:
      penstock plan gpt_small --cluster h100
      penstock plan --profile gpt.json --cluster '4 x dgx-h100' --batch-size 1024 --html plan.html
      penstock plan gpt_small --cluster dgx-a100
      penstock plan mymodel:example --cluster h100
      penstock plan mymodel:example --cluster h100 --compare layouts.toml
      penstock plan digits --cluster here.toml --num-replicas 1 --save plan.json
      penstock train digits --plan plan.json
    """
    from penstock.automatic.plan_model import choose, on_cores
    from penstock.costs.cluster import Cluster
    from penstock.planner.candidates import Constraints
    from penstock.planner.shared_cores import num_cores

    # 1. Check the options before anything slow runs.
    cluster = Cluster.load(cluster_name)
    if compare is not None:
        _refuse_beside_compare(target_name)
        values = click.get_current_context().params
        compare_layouts(str(target_name), cluster, compare, values)
        return
    if (target_name is None) == (not profiles):
        raise click.UsageError("give either a TARGET or --profile")
    # 2. Find the model: a target, or saved profiles, which need no PyTorch.
    model = _model(target_name, overrides, profiles, is_changed=bool(sizes) or measure)
    batch_size = batch_size or (None if target_name is None else model.batch_size)
    if batch_size is None:
        raise click.UsageError("a profile does not say how large batches are; give --batch-size")
    # 3. Choose the plan.
    constraints = Constraints(
        batch_size=batch_size,
        offload=not decided.pop("no_offload"),
        schedules=decided.pop("schedules") or None,
        **decided,
    )
    say(f"planning for {cluster.name} ({count_text(len(cluster.places), 'device')})")
    choice = choose(
        model,
        cluster,
        batch_size,
        constraints=constraints,
        num_best=best,
        sizes=sizes,
        threads=sorted({1, num_cores()}) if on_cores(cluster) else (),
        measure=measure or None,
        sharding=sharding,
    )
    # 4. Save and print it.
    if save is not None:
        choice.plan.save(save)
        _save_prediction(save.with_suffix(".predicted.json"), choice.timeline)
        run = _run_command(target_name, save, choice.plan.placement)
        click.echo(f"{save} is written; it is run by: {run}", err=True)
    if html is not None:
        from penstock.planner.plan_page import plan_page
        from penstock.trace.page import write_page

        write_page(plan_page(choice), html)
    click.echo(choice.plan.to_json() if as_json else str(choice), nl=False)


def _model(
    name: str | None, overrides: tuple[str, ...], profiles: tuple[Path, ...], *, is_changed: bool
) -> Any:
    """Return the target, or saved profiles, which need no PyTorch; a click.UsageError for options
    that change how layers are profiled (`is_changed`) beside those.
    """
    if name is not None:
        say(f"loading PyTorch, to plan for {name}")
        require_torch()
        from .targets import load_target

        return load_target(name, overrides)
    from penstock.costs.profile import Profile

    if overrides or is_changed:
        raise click.UsageError(
            "--set, --microbatch-size and --measure are for a TARGET, not for a profile"
        )
    return [Profile.load(path) for path in profiles]


def _refuse_beside_compare(name: str | None) -> None:
    """Raise a click.UsageError for --compare without a target, or beside options to choose by."""
    if name is None:
        raise click.UsageError(
            "--compare divides the operators of a model, which a profile in a file does not "
            "have; give a TARGET"
        )
    chosen = ("profiles", "sizes", "num_ranks", "num_replicas", "num_microbatches", "sharding")
    if beside := given_options(*chosen, "measure", "schedules", "no_offload", "best", "save"):
        raise click.UsageError(
            f"{beside[0]} is for a plan that is chosen, and the layouts of --compare are given; "
            "leave one of the two out"
        )


def _save_prediction(path: Path, timeline: "Timeline") -> None:
    """Write what was predicted for a plan; a PlanError if it cannot be written."""
    try:
        path.write_text(timeline.to_json(), encoding="utf-8")
    except OSError as error:
        raise PlanError(f"cannot write {path}: {error.strerror}") from None


def _run_command(name: str | None, path: Path, placement: "Placement") -> str:
    """Return the command that runs a plan; its stages can be threads of one process."""
    is_alone = placement.num_replicas == placement.most_shards == 1
    processes = count_text(placement.num_ranks, "process")
    if name is None or ":" in name:
        where = "" if is_alone else f", in {processes} of torchrun"
        return f'penstock.Pipeline(model, plan=penstock.Plan.load("{path}"), ...){where}'
    train = f"penstock train {name} --plan {path}"
    return train if is_alone else f"torchrun, in {processes}: -m {train}"
