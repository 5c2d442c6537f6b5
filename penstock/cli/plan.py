"""`penstock plan`: how to run a model on a cluster."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from penstock.schedules.names import SCHEDULE_NAMES
from penstock.trace.progress import say
from penstock.trace.units import count_text

from .options import require_torch, set_option

if TYPE_CHECKING:
    from penstock.automatic.target import Target
    from penstock.costs.cluster import Cluster
    from penstock.costs.profile import Profile
    from penstock.planner.placement import Placement
    from penstock.planner.plan import Plan

_FILE = click.Path(dir_okay=False, path_type=Path)
_COUNT = click.IntRange(min=1)


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
    type=_FILE,
    multiple=True,
    help="Take what the layers cost from there instead of from TARGET; several: one model, "
    "measured with several numbers of threads.",
)
@click.option(
    "--batch-size",
    metavar="N",
    type=_COUNT,
    help="Samples of a step over all replicas.  [default: the target's]",
)
@click.option(
    "--microbatch-size",
    "sizes",
    metavar="N",
    type=_COUNT,
    multiple=True,
    help="Samples for which TARGET's layers are profiled.  [default: a few up to the batch]",
)
@click.option("--num-ranks", type=_COUNT, help="Devices of one replica.")
@click.option("--num-replicas", type=_COUNT, help="D.")
@click.option("--num-microbatches", type=_COUNT, help="M, of each replica.")
@click.option(
    "--sharding",
    metavar="NAME",
    help="The ready plan by which the devices of a stage share it, such as megatron; beside "
    "--sub-meshes.  [default: the target's]",
)
@click.option(
    "--sub-meshes",
    is_flag=True,
    help="Plan stages on several devices each, of unlike numbers, whose operators these share "
    "(Alpa); needs TARGET, and uses all devices.  A recipe is planned so that says "
    'pipeline.plan = "auto".',
)
@click.option(
    "--measure",
    is_flag=True,
    help="Run the layers of TARGET's model first, here, on a device of the cluster's kind, and "
    "let them count as measured; beside --sub-meshes.  [default: the target's]",
)
@click.option(
    "--schedule",
    "schedules",
    type=click.Choice(SCHEDULE_NAMES),
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
@click.option("--best", type=_COUNT, default=5, show_default=True, help="Rows of the table.")
@click.option(
    "--save",
    metavar="FILE.json",
    type=_FILE,
    help="Write the plan there, and its timeline beside it (FILE.predicted.json), which the "
    "report of a run with --plan FILE.json shows above the measured one.",
)
@click.option("--html", metavar="FILE", type=_FILE, help="Write a page with its timeline there.")
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Write the plan as JSON, and no table.",
)
def plan(  # noqa: PLR0913 - one for each option
    target_name: str | None,
    overrides: tuple[str, ...],
    cluster_name: str,
    profiles: tuple[Path, ...],
    batch_size: int | None,
    sizes: tuple[int, ...],
    best: int,
    save: Path | None,
    html: Path | None,
    as_json: bool,
    sharding: str | None,
    sub_meshes: bool,
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
      penstock plan gpt_small --cluster dgx-a100 --sub-meshes
      penstock plan mymodel:example --cluster h100
      penstock plan digits --cluster here.toml --num-replicas 1 --save plan.json
      penstock train digits --plan plan.json
    """
    from penstock.costs.cluster import Cluster

    cluster = Cluster.load(cluster_name)
    if html is not None:
        from penstock.trace.page.page import check_page

        check_page(html)
    if (target_name is None) == (not profiles) and not (sub_meshes and target_name is None):
        raise click.UsageError("give either a TARGET or --profile")
    target = None if target_name is None else _target(target_name, overrides)
    if sub_meshes or (target is not None and target.plans_itself):
        number = decided["num_microbatches"]
        asked = {"sharding": sharding, "num_microbatches": number, "measure": measure}
        chosen, told = _on_sub_meshes(target, cluster, html, **asked), ""
        if save is not None:
            chosen.save(save)
    else:
        _check_whole_devices(sharding, measure=measure)
        costs = _Costs(target, overrides, profiles, sizes)
        chosen, told = _on_devices(costs, cluster, batch_size, best, (save, html), decided)
    if save is not None:
        run = _run_command(target_name, save, chosen.placement)
        click.echo(f"{save} is written; it is run by: {run}", err=True)
    click.echo(chosen.to_json() if as_json else f"{chosen}\n{told}", nl=False)


def _target(name: str, overrides: tuple[str, ...]) -> "Target":
    say(f"loading PyTorch, to plan for {name}")
    require_torch()
    from .targets import load_target

    return load_target(name, overrides)


@dataclass(frozen=True)
class _Costs:
    """The model that is planned for: a target to profile, or profiles that were saved."""

    target: "Target | None"
    overrides: tuple[str, ...]
    files: tuple[Path, ...]
    sizes: tuple[int, ...]

    def profiles(self, cluster: "Cluster") -> tuple[list["Profile"], int | None]:
        """Return the model's profiles, and the samples of its batches where these are known."""
        if self.target is not None:
            return self.target.profiles_for(cluster, self.sizes), self.target.batch_size
        from penstock.costs.profile import Profile

        if self.overrides or self.sizes:
            raise click.UsageError("--set and --microbatch-size change a TARGET, not a profile")
        return [Profile.load(path) for path in self.files], None


def _on_devices(
    costs: _Costs,
    cluster: "Cluster",
    batch_size: int | None,
    num_best: int,
    files: tuple[Path | None, Path | None],
    decided: dict[str, Any],
) -> tuple["Plan", str]:
    """Plan stages on whole devices, and write plan and page; return the plan and its rivals."""
    from penstock.planner.candidates import Constraints
    from penstock.planner.make_plan import choose_plan, save_prediction
    from penstock.planner.reasons import choices_text

    found, usual_size = costs.profiles(cluster)
    batch_size = batch_size or usual_size
    if batch_size is None:
        raise click.UsageError("a profile does not say how large batches are; give --batch-size")
    asked = Constraints(
        batch_size=batch_size,
        offload=not decided.pop("no_offload"),
        schedules=decided.pop("schedules") or None,
        **decided,
    )
    say(f"planning for {cluster.name} ({count_text(len(cluster.places), 'device')})")
    chosen, choices = choose_plan(found, cluster, batch_size, constraints=asked, num_best=num_best)
    save, html = files
    if save is not None:
        chosen.save(save)
        save_prediction(save, choices.best[0].predicted.timeline)
    if html is not None:
        from penstock.planner.plan_page import plan_page
        from penstock.trace.page.page import write_page

        write_page(plan_page(chosen, choices, cluster), html)
    return chosen, f"\n{choices_text(choices)}"


def _check_whole_devices(sharding: str | None, *, measure: bool) -> None:
    """See that nothing is asked for that planning without sub-meshes does not look at."""
    if sharding is not None:
        raise click.UsageError(
            "--sharding is how the devices of a stage share a model; give --sub-meshes too"
        )
    if measure:
        raise click.UsageError(
            '--measure is how --sub-meshes, or a recipe with pipeline.plan = "auto", are planned; '
            "without them CPUs are always measured (of accelerators, give --profile)"
        )


def _on_sub_meshes(
    target: "Target | None", cluster: "Cluster", html: Path | None, **asked: Any
) -> "Plan":
    """Plan stages on sub-meshes; most that is decided for whole devices has no meaning there."""
    if target is None:
        raise click.UsageError("--sub-meshes needs a TARGET: a profile has no operators")
    context = click.get_current_context()
    given = [
        option.opts[0]
        for option in context.command.params
        if context.get_parameter_source(option.name or "") is ParameterSource.COMMANDLINE
        and option.name not in _BESIDE_SUB_MESHES
    ]
    if given:
        raise click.UsageError(
            f'{", ".join(given)} beside --sub-meshes, or a recipe with pipeline.plan = "auto", '
            "which does not look at that; leave one of them out"
        )
    from penstock.planner.mesh_plans import choose_on_meshes

    task = target.mesh_task(cluster, **asked)
    say(f"planning for {cluster.name} ({count_text(len(cluster.places), 'device')})")
    choice = choose_on_meshes(task)
    if html is not None:
        from penstock.planner.plan_page import mesh_plan_page
        from penstock.trace.page.page import write_page

        write_page(mesh_plan_page(task, choice), html)
    return choice.plan


_BESIDE_SUB_MESHES = (
    *("target_name", "overrides", "cluster_name", "sub_meshes", "sharding", "num_microbatches"),
    *("measure", "save", "html", "as_json"),
)
"""What planning on sub-meshes looks at."""


def _run_command(name: str | None, path: Path, placement: "Placement") -> str:
    """Say how a plan is run: replicas and shards are processes, stages can be threads of one."""
    is_alone = placement.num_replicas == placement.most_shards == 1
    processes = count_text(placement.num_ranks, "process")
    if name is None or ":" in name:
        where = "" if is_alone else f", in {processes} of torchrun"
        return f'penstock.Pipeline(model, plan=penstock.Plan.load("{path}"), ...){where}'
    train = f"penstock train {name} --plan {path}"
    return train if is_alone else f"torchrun, in {processes}: -m {train}"
