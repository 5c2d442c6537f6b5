"""`penstock scale`: how a model's step and its price change with the number of devices."""

from pathlib import Path

import click

from penstock.trace.units import columns

from .options import (
    COUNT,
    batch_size_option,
    html_option,
    require_torch,
    set_option,
    sharding_option,
)

_AND_SO_ON = "..."


def _counts(text: str) -> tuple[int, ...]:
    """Read numbers of devices: "8,16,32", or with "..." for doubling: "8,...,1024"."""
    counts: list[int] = []
    words = [word.strip() for word in text.split(",")]
    for word, last in zip(words, [*words[1:], ""], strict=True):
        if word == _AND_SO_ON and counts and last.isdigit():
            while counts[-1] * 2 < int(last):
                counts.append(counts[-1] * 2)
            if counts[-1] * 2 != int(last):
                raise click.BadParameter(f"{text}: {counts[0]} doubled is never {last}")
        elif word.isdigit() and int(word):
            counts.append(int(word))
        else:
            raise click.BadParameter(
                f"{text}: give numbers such as 8,16,32, or 8,...,1024 for doubling"
            )
    return tuple(counts)


@click.command()
@click.argument("target_name", metavar="TARGET")
@set_option
@click.option(
    "--cluster",
    "cluster_name",
    metavar="NAME_OR_FILE",
    required=True,
    help="A cluster of one kind of host, which is repeated, or of which a part is taken.",
)
@click.option(
    "--devices",
    "counts",
    metavar="N,N,...",
    type=_counts,
    required=True,
    help="Numbers of devices; 8,...,1024 is 8 and its doubles up to 1024.",
)
@batch_size_option
@click.option("--num-microbatches", type=COUNT, help="M, for all.  [default: planned]")
@sharding_option
@click.option(
    "--samples",
    "num_samples",
    metavar="N",
    type=COUNT,
    help="Give the device-hours of so many samples.  [default: of 1,000 steps]",
)
@html_option
@click.option("--json", "as_json", is_flag=True, help="Write JSON, with each plan, and no table.")
def scale(  # noqa: PLR0913 - one for each option
    target_name: str,
    overrides: tuple[str, ...],
    cluster_name: str,
    counts: tuple[int, ...],
    batch_size: int | None,
    num_microbatches: int | None,
    sharding: str | None,
    num_samples: int | None,
    html: Path | None,
    as_json: bool,
) -> None:
    """Plan TARGET's model for several numbers of devices, and tell what each gains and costs.

    The layers are counted, not run.  The search is a quick one: stages on meshes whose sizes are
    powers of two or divide a host; `penstock plan` looks at more for one number.

    \b
    Examples:
      penstock scale gpt_small --cluster dgx-h100 --devices 8,16,...,256 --html scale.html
      penstock scale mymodel:example --cluster dgx-h100 --devices 4,8,16 --samples 1000000
    """
    from penstock.costs.cluster import Cluster
    from penstock.planner.candidates import Constraints

    # 1. Check the options before anything slow runs.
    cluster = Cluster.load(cluster_name)
    require_torch()
    from penstock.automatic.scaling import part_of, scale_page
    from penstock.automatic.scaling import scale as scaled
    from penstock.trace.page import write_page

    for count in counts:
        part_of(cluster, count)
    # 2. Plan for all numbers.
    from .targets import load_target

    target = load_target(target_name, overrides)
    batch_size = batch_size or target.batch_size
    scaling = scaled(
        target,
        cluster,
        counts,
        batch_size,
        constraints=Constraints(batch_size=batch_size, num_microbatches=num_microbatches),
        sharding=sharding,
    )
    # 3. Write and print them.
    if html is not None:
        write_page(scale_page(scaling, num_samples), html)
    if as_json:
        click.echo(scaling.to_json(num_samples))
        return
    click.echo("\n".join(columns([*scaling.rows(num_samples)])))
