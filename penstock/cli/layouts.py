"""Given layouts on the command line: one by options, or several in a file."""

import json
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from penstock.errors import ConfigError, UnreadableError, shown
from penstock.trace.progress import say
from penstock.trace.units import columns, count_text, time_text

from .options import COUNT, given_options, require_torch

if TYPE_CHECKING:
    from penstock.costs.cluster import Cluster
    from penstock.planner.layout_figures import LayoutFigures
    from penstock.planner.parallelism import Parallelism

_F = TypeVar("_F", bound=Callable[..., Any])
_ONLY_HERE = (
    *("tensor", "data", "pipeline", "virtual", "expert", "context", "microbatch_size"),
    *("sequence", "zero", "partition", "recompute_num_layers", "batch_size"),
)
"""Options that only a layout has."""
_ONLY_OF_UNITS: Mapping[str, str] = {
    "num_stages": "give --pipeline and --virtual instead",
    "stages_per_rank": "give --virtual instead",
    "window": "a layout has one mini-batch; leave it out",
    "width": "the step is drawn by --html; leave it out",
    "csv": "give --schedule instead",
    "write_csv": "leave it out, or leave out --cluster",
    **dict.fromkeys(
        ("forward", "backward_input", "backward_weight", "transfer"),
        "the cluster prices the model; leave it out",
    ),
}
"""Options of steps in units of time, and what to do about them beside --cluster."""


def layout_options(command: _F) -> _F:
    """Add the options of a layout on a cluster."""
    counts = {
        "batch-size": "Samples of a step.  [default: the target's, or as --num-microbatches says]",
        "recompute-num-layers": "Layers of each stage that --recompute layers repeats, the first "
        "ones.  [default: all]",
        "microbatch-size": "Samples of a micro-batch in each row.  [default: 1]",
        "context": "Devices with slices of the positions of a row.  [default: 1]",
        "expert": "Devices along data among which experts are divided.  [default: 1]",
        "virtual": "Stages on each mesh, interleaved.  [default: 1]",
        "pipeline": "Meshes of the pipeline.  [default: 1]",
        "data": "Rows of devices with samples of their own.  [default: all that there are]",
        "tensor": "Devices that share each operator.  [default: 1]",
    }
    options = [
        click.option(
            "--partition",
            metavar="LAYERS",
            help="Layers of each stage: 3,4,4,3, or Megatron's layout, such as 'Et*3|(tt|)*2L'.",
        ),
        click.option(
            "--zero", type=click.IntRange(0, 3), help="Stage of ZeRO, along data.  [default: 0]"
        ),
        click.option("--sequence", is_flag=True, help="Cut positions where operators are whole."),
        *(
            click.option(f"--{name}", metavar="N", type=COUNT, help=text)
            for name, text in counts.items()
        ),
        click.option(
            "--cluster",
            "cluster_name",
            metavar="CLUSTER",
            help="Predict the step of TARGET in a layout on this cluster: a preset or a file.",
        ),
    ]
    for option in options:
        command = option(command)
    return command


def layout_given(name: str | None, values: Mapping[str, Any]) -> "Parallelism | None":
    """Return the layout of the options of `simulate`; None without --cluster.

    Raises:
        click.UsageError: options of both forms, or no target.
        ConfigError: the layout cannot be.
    """
    # 1. Refuse what belongs to the other form.
    if values["cluster_name"] is None:
        if beside := given_options(*_ONLY_HERE):
            raise click.UsageError(
                f"{beside[0]} is of a layout on devices; give --cluster and a TARGET too, or "
                "leave it out"
            )
        if values["recompute"] == "layers":
            raise click.UsageError(
                "--recompute layers is of a layout on devices; give --cluster and a TARGET too, "
                "or --recompute alone"
            )
        return None
    for option, remedy in _ONLY_OF_UNITS.items():
        if beside := given_options(option):
            raise click.UsageError(f"{beside[0]} does not go with --cluster: {remedy}")
    if name is None:
        raise click.UsageError("--cluster predicts the step of a model; give one as TARGET")
    # 2. Take what is given; all else has the defaults of `Parallelism`.
    names = (*_ONLY_HERE[:-1], "num_microbatches", "schedule", "recompute")
    given = {key: values[key] for key in names if given_options(key)}
    parts = str(given.get("partition", "")).replace(" ", "").split(",")
    if all(map(str.isdigit, parts)):
        given["partition"] = tuple(map(int, parts))
    return _layout(given)


def _layout(given: Mapping[str, Any]) -> "Parallelism":
    """Return a layout, with the schedule read too; a ConfigError says what cannot be."""
    from penstock.planner.parallelism import Parallelism

    layout = Parallelism(**given)
    _ = layout.family  # an unknown name is the user's mistake, whatever the cluster
    return layout


def layouts_in(path: Path) -> "dict[str, Parallelism]":
    """Read the layouts of a TOML file by name: a table for each, with `Parallelism`'s keys.

    Raises:
        UnreadableError, ConfigError: names the file, the table and what is wrong there.
    """
    from penstock.costs.cluster.files import naming, parsed

    with naming(path):
        data = parsed(path.read_text(encoding="utf-8", errors="replace"))
        if not data:
            raise UnreadableError(
                "it has no layouts; give a table for each, such as [mine] with tensor = 2"
            )
        layouts = {}
        for name, table in data.items():
            with naming(f"[{name}]"):
                layouts[name] = _layout(_checked(table))
    return layouts


def _checked(table: Any) -> dict[str, Any]:
    """Return the keys of a layout's table; an UnreadableError names an unknown key, or a value of
    a type that `Parallelism` does not check.
    """
    from penstock.planner.parallelism import Parallelism

    known = [own.name for own in fields(Parallelism)]
    if not isinstance(table, dict):
        raise UnreadableError(
            f"it is {shown(table)}; give a table with keys such as tensor and pipeline"
        )
    for key in table:
        if key not in known:
            raise UnreadableError(f"it has an unknown key {key}; known are {', '.join(known)}")
    sequence, partition = table.get("sequence", False), table.get("partition", "")
    if not isinstance(sequence, bool):
        raise UnreadableError(f"sequence is {shown(sequence)}; give true or false")
    is_list = isinstance(partition, list) and all(type(n) is int for n in partition)
    if not is_list and not isinstance(partition, str):
        raise UnreadableError(
            f"partition is {shown(partition)}; give a list of whole numbers, or Megatron's layout"
        )
    return {**table, **({"partition": tuple(partition)} if is_list else {})}


def figures_for(
    name: str,
    overrides: tuple[str, ...],
    cluster: "Cluster",
    layouts: "Mapping[str, Parallelism]",
    **options: Any,
) -> "list[LayoutFigures]":
    """Return the figures of a target in layouts by name, the fastest first.

    `options` are more arguments of `compared`; the usual batch is the target's.
    """
    say(f"loading PyTorch, to count the layers of {name}")
    require_torch()
    from penstock.planner.layout_figures import compared

    from .targets import load_target

    target = load_target(name, overrides)
    # 1. Count the layers once, for the micro-batches of all layouts.
    sizes = set()
    for layout in layouts.values():
        try:
            sizes.add(layout.rows(cluster) * layout.microbatch_size)
        except ConfigError:
            continue  # it is a row with this reason
    (profile,) = target.profiles_for(cluster, sorted(sizes), measure=False)
    # 2. Price the layouts.
    say(f"simulating {count_text(len(layouts), 'layout')}")
    usual = target.batch_size
    return compared(layouts, profile, cluster, usual_batch_size=usual, **options)


def simulate_layout(name: str, layout: "Parallelism", values: Mapping[str, Any]) -> None:
    """Print the figures of a target's step in a layout; `values` are the options of `simulate`.

    Raises:
        ConfigError: the layout cannot be on the cluster.
    """
    from penstock.costs.cluster import Cluster
    from penstock.planner.layout_figures import layout_page
    from penstock.trace.page import write_page

    cluster, html = Cluster.load(values["cluster_name"]), values["html"]
    batch_size, overrides = values["batch_size"], values["overrides"]
    (own,) = figures_for(name, overrides, cluster, {name: layout}, batch_size=batch_size)
    if own.candidate is None:
        raise ConfigError(own.reason)
    if html is not None:
        write_page(layout_page(own), html)
    if values["as_json"]:
        click.echo(json.dumps(own.plain))
        return
    cells = {name: text for name, text in own.cells.items() if text}
    cells["name"] += f" on {cluster.name}: {layout}"
    cells["step"] += f", {time_text(own.own.update_s)} of it the optimizer"
    click.echo("\n".join(columns([*cells.items()], num_left=2)))
    click.echo("\n".join(("", *columns(own.own.plan.rows))))


def compare_layouts(name: str, cluster: "Cluster", path: Path, values: Mapping[str, Any]) -> None:
    """Print the layouts of a file, the fastest first; `values` are the options of `plan`."""
    from penstock.planner.layout_figures import best_in_words, layouts_page, rows_of
    from penstock.trace.page import write_page

    html, layouts = values["html"], layouts_in(path)
    options = {key: values[key] for key in ("batch_size", "memory_share")}
    figures = figures_for(name, values["overrides"], cluster, layouts, **options)
    if html is not None:
        write_page(layouts_page(name, cluster, figures), html)
    if values["as_json"]:
        click.echo(json.dumps([own.plain for own in figures]))
        return
    click.echo("\n".join((best_in_words(figures), "", *columns(rows_of(figures)))))
