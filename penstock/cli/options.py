"""The words of the command line with the values they stand for, and its exit codes."""

import os

import click

from penstock.schedules.names import stages_on_ranks

USER_ERROR = 2
INTERRUPTED = 130

num_processes_option = click.option(
    "--num-processes",
    type=click.IntRange(min=1),
    help="Run in so many processes of this host instead of one; to train, K x D of them.",
)

set_option = click.option(
    "--set",
    "overrides",
    metavar="SECTION.KEY=VALUE",
    multiple=True,
    help="Change a key of the recipe.",
)

stages_per_rank_option = click.option(
    "--stages-per-rank",
    type=click.IntRange(min=1),
    help=f"Stages in each thread: {stages_on_ranks()}; 1 for all others.  [default: the least]",
)


def require_torch() -> None:
    """Refuse a torch that Penstock does not work with, in one line, where torch is first needed.

    Raises:
        TorchError: it is too old, or lacks a private name; says which versions work.
    """
    import penstock.torch_private  # noqa: F401 - for what it raises


def refuse_inside_torchrun() -> None:
    """See that this process was not started as one of several already.

    Raises:
        click.UsageError: it was.
    """
    if "WORLD_SIZE" in os.environ:
        raise click.UsageError(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']} says that torchrun started this process "
            "already; leave out --num-processes"
        )
