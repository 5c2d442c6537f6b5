"""`penstock profile`: measure or count the cost of each layer of a model."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from penstock.trace.progress import say

from .options import COUNT, require_torch, set_option

if TYPE_CHECKING:
    from penstock.costs.cluster import Device
    from penstock.costs.profile import Profile


@click.command()
@click.argument("target")
@set_option
@click.option(
    "--device",
    metavar="NAME_OR_FILE",
    help="Count the layers, and price them for this device: h100 and the like, or a TOML file "
    "with its figures.  [default: measure them here]",
)
@click.option(
    "--microbatch-size",
    "sizes",
    metavar="N",
    type=COUNT,
    multiple=True,
    help="Samples in a micro-batch; several may be given.  [default: the target's]",
)
@click.option("--busy", is_flag=True, help="Measure again while all other cores do the same.")
@click.option("--save", metavar="FILE", type=click.Path(path_type=Path), help="Write JSON there.")
@click.option("--json", "as_json", is_flag=True, help="Write the profile as JSON.")
def profile(  # noqa: PLR0913 - one for each option
    target: str,
    overrides: tuple[str, ...],
    device: str | None,
    sizes: tuple[int, ...],
    busy: bool,
    save: Path | None,
    as_json: bool,
) -> None:
    """Show what each layer of a model costs: measured here, or counted for a device.

    TARGET is package.module:function, as `penstock check` takes it, or a recipe.

    Seconds of a forward (F), of a whole backward (B), of its weight part (W) and of a recompute;
    FLOPs, what is kept for the backward, what lives between a layer and the next, parameters.
    Counting needs no memory for weights, and no such device.

    \b
    Examples:
      penstock profile digits
      penstock profile digits --device h100 --microbatch-size 16 --microbatch-size 64
      penstock profile digits --save here.json
      penstock profile mymodel:example --device a100
    """
    # 1. Check the options before PyTorch is loaded.
    if busy and device is not None:
        raise click.UsageError("--busy measures, and --device counts; leave out one of them")
    from penstock.costs.cluster.cluster import load_device

    described = None if device is None else load_device(device)
    say(f"loading PyTorch, to profile {target}")
    require_torch()
    from .targets import load_target

    # 2. Count or measure, save and print.
    counted = load_target(target, overrides).profile(sizes, described, busy=busy)
    if save is not None:
        counted.save(save)
    if as_json:
        click.echo(counted.to_json(), nl=False)
        return
    click.echo("\n".join(_shown(counted, described)))


def _shown(profile: "Profile", device: "Device | None") -> list[str]:
    """Return the lines of a table, with the costs on `device` if there is one."""
    from penstock.costs.layer_costs import layer_costs
    from penstock.costs.profile import profile_lines

    if device is None:
        return list(profile_lines(profile))
    priced = [layer_costs(profile, device, size.microbatch_size) for size in profile.sizes]
    return [f"priced for {device.name}", *profile_lines(profile, priced)]
