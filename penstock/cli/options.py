"""The words of the command line with the values they stand for, and its exit codes."""

import os

import click

from penstock.schedules import ALL_SCHEDULES

SCHEDULES = {function.__name__: function for function in ALL_SCHEDULES}
SCHEDULE_NAMES = tuple(SCHEDULES)

USER_ERROR = 2
INTERRUPTED = 130

num_processes_option = click.option(
    "--num-processes",
    type=click.IntRange(min=1),
    help="Run in so many processes of this host instead of one; to train, K x D of them.",
)


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
