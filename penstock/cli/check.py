"""`penstock check`: is the pipeline the unsplit model, to the bit?"""

from typing import Any

import click

from penstock.schedules.names import ASYNCHRONOUS_NAMES, SCHEDULE_NAMES
from penstock.types import Recompute

from .options import COUNT, ScheduleName, require_torch, set_option, stages_per_rank_option

_NAMES = [name for name in SCHEDULE_NAMES if name not in ASYNCHRONOUS_NAMES]
"""The families whose training step equals the unsplit model's."""


@click.command()
@click.argument("target")
@set_option
@click.option("--num-stages", type=COUNT, help="K.  [default: the recipe's, or 2]")
@stages_per_rank_option
@click.option(
    "--num-microbatches",
    type=COUNT,
    help="M.  [default: the recipe's, or 4; fewer where BatchNorm needs it]",
)
@click.option(
    "--schedule", type=ScheduleName(_NAMES), help="[default: the recipe's, or one_f_one_b]"
)
@click.option(
    "--recompute",
    type=click.Choice([policy.value for policy in Recompute]),
    help="[default: the recipe's, or stage]",
)
@click.option("--json", "as_json", is_flag=True, help="Write the report as JSON.")
def check(  # noqa: PLR0913 - one for each option
    target: str,
    overrides: tuple[str, ...],
    num_stages: int | None,
    stages_per_rank: int | None,
    num_microbatches: int | None,
    schedule: str | None,
    recompute: str | None,
    as_json: bool,
) -> int:
    """Compare a training step of a pipeline with the unsplit model, bit by bit.

    Compared are the loss, every gradient, every buffer, and the outputs in evaluation mode.

    TARGET is a recipe, by name or as a file, or package.module:function; the function takes
    nothing and returns (layers, inputs, targets, loss), or any model and what it is called with:
    (model, example_inputs).  Such a model is captured; its loss is the one in its output, if
    there is one, else a number to which all outputs add.  Exit code 0 if equal, 1 if not.

    \b
    Examples:
      penstock check digits --num-stages 4
      penstock check gpt_small --set data.path=book.txt
      penstock check mymodel:example --num-stages 2 --num-microbatches 8 --schedule one_f_one_b
    """
    require_torch()
    from penstock.equality import check as compare
    from penstock.torch_private import AnyBatchNorm

    from .targets import load_target

    # 1. Read the target, with the options that were given.
    options = {
        "num_stages": num_stages,
        "stages_per_rank": stages_per_rank,
        "num_microbatches": num_microbatches,
        "schedule": schedule,
        "recompute": recompute,
    }
    options_set = {key: value for key, value in options.items() if value is not None}
    loaded = load_target(target, overrides, options_set, needs_values=True)
    # 2. Compare, and print the report.
    layers = loaded.resolved()
    given: dict[str, Any] = dict(loaded.options)
    most = max(1, loaded.batch_size // 2)
    if num_microbatches is None and ":" in target and given["num_microbatches"] > most:
        modules = (m for layer in layers.modules for m in layer.modules())
        if any(isinstance(m, AnyBatchNorm) and m.training for m in modules):
            given["num_microbatches"] = most
            click.echo(f"M={most}: BatchNorm needs two samples in each micro-batch", err=True)
    report = compare(
        layers,
        loaded.inputs,
        loaded.targets,
        loss=loaded.loss,
        reduction=loaded.reduction,
        example_inputs=loaded.inputs,
        **given,
    )
    click.echo(report.to_json() if as_json else str(report))
    return 0 if report.equal else 1
