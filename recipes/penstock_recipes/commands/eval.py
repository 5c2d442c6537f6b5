"""`penstock eval`: the scores of a run's checkpoint."""

import json
import os
from pathlib import Path

import click

from penstock.cli import (
    launch,
    num_processes_option,
    refuse_inside_torchrun,
    require_torch,
    say,
    set_option,
)

WHICH = ("best", "newest")
"""The checkpoints that can be named."""

checkpoint_option = click.option(
    "--checkpoint",
    "which",
    type=click.Choice(WHICH),
    default="best",
    show_default=True,
    help="The one with the best main score of an epoch, or the newest.",
)


@click.command("eval")
@click.argument("run", metavar="RUN_FOLDER", type=click.Path(path_type=Path))
@checkpoint_option
@set_option
@click.option("--device", metavar="KIND_OR_DEVICE", help="Compute on it, as `penstock train`.")
@num_processes_option
@click.option("--json", "as_json", is_flag=True, help="Write the scores as one line of JSON.")
def evaluate(
    run: Path,
    which: str,
    overrides: tuple[str, ...],
    device: str | None,
    num_processes: int | None,
    as_json: bool,
) -> int:
    """Compute the scores of a run's best or newest checkpoint on its held-out samples.

    Nothing is trained, and the run folder does not change.  The scores are those that the run had
    after that epoch, for any number of stages.

    \b
    Examples:
      penstock eval runs/digits-1
      penstock eval runs/digits-1 --checkpoint newest --set pipeline.num_stages=3 --json
      penstock eval runs/digits-1 --num-processes 2
    """
    if device is not None:
        overrides += (f"pipeline.device={json.dumps(device)}",)
    if num_processes is not None:
        refuse_inside_torchrun()
        require_torch()
        words = ["eval", str(run), "--checkpoint", which, *(["--json"] if as_json else [])]
        sets = [word for override in overrides for word in ("--set", override)]
        return launch(num_processes, 0, [*words, *sets])
    is_first = os.environ.get("RANK", "0") == "0"
    if is_first:
        say(f"loading PyTorch, to evaluate {run}")
    require_torch()
    from rich.console import Console

    from penstock_recipes.train.command import Request
    from penstock_recipes.train.evaluate import evaluate_run
    from penstock_recipes.train.run_folder import Which

    console = Console(stderr=True, quiet=not is_first)
    found = evaluate_run(Request(None, overrides, run), Which(which), console)
    if is_first:
        click.echo(found.to_json() if as_json else str(found))
    return 0
