"""Options that several commands share, the launcher of processes, and exit codes."""

import logging
import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from penstock.errors import ConfigError
from penstock.schedules.names import schedule_name, stages_on_ranks

FAILED = 1
"""The exit code of a process that was ended without one."""
USER_ERROR = 2
"""The exit code after a user's mistake."""
INTERRUPTED = 130
"""The exit code after Ctrl-C."""
RECIPES_PACKAGE = "penstock-recipes"
"""The package that trains the papers' tasks; the library does not need it."""
COUNT = click.IntRange(min=1)
"""A number of things, of which there is at least one."""
FILE = click.Path(dir_okay=False, path_type=Path)
"""A file to read or to write."""


class ScheduleName(click.Choice[str]):
    """The name of a family, or another name of it, such as 1f1b."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: Any) -> str:
        with suppress(ConfigError):
            value = schedule_name(value)
        return super().convert(value, param, ctx)


def launch(num_processes: int, max_restarts: int, arguments: Sequence[str]) -> int:
    """Run `penstock ARGUMENTS` in `num_processes` processes; return the exit code of the command.

    Each process reports its own errors, so torchrun's report is left out.
    """
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # 1. Quiet torchrun: it has no news for the user.
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun would say so, and do the same
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    logging.getLogger("torch.distributed.run").setLevel(logging.CRITICAL)
    # 2. Start the processes, and translate their end into an exit code.
    is_nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN  # torchrun would end for it
    options = torchrun.parse_args(
        [
            *(("--signals-to-handle", "SIGTERM,SIGINT,SIGQUIT") if is_nohup else ()),
            *("--standalone", "--nproc-per-node", str(num_processes)),
            *("--max-restarts", str(max_restarts), "-m", "penstock", *arguments),
        ]
    )
    try:
        torchrun.run(options)
    except ChildFailedError as error:
        code = error.get_first_failure()[1].exitcode
        return code if code > 0 else FAILED
    except SignalException as error:
        return INTERRUPTED if error.sigval == signal.SIGINT else 128 + error.sigval
    return 0


num_processes_option = click.option(
    "--num-processes",
    type=COUNT,
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
    type=COUNT,
    help=f"Stages in each thread: {stages_on_ranks()}; 1 for all others.  [default: the least]",
)


batch_size_option = click.option(
    "--batch-size",
    metavar="N",
    type=COUNT,
    help="Samples of a step over all replicas.  [default: the target's]",
)


def _checked_page(_context: Any, _option: Any, path: Path | None) -> Path | None:
    """Check the file of a page before anything slow runs."""
    if path is not None:
        from penstock.trace.page.page import check_page

        check_page(path)
    return path


html_option = click.option(
    "--html", metavar="FILE", type=FILE, callback=_checked_page, help="Write a page there."
)

sharding_option = click.option(
    "--sharding",
    metavar="NAME",
    callback=lambda _context, _option, name: None if name == "none" else name or "auto",
    help="The ready plan by which the devices of a stage share it, such as megatron; none: each "
    "stage has one device.  [default: the target's, or whatever is fastest]",
)


def given_options(*names: str) -> list[str]:
    """Return those of these options that are on the command line, as they are written there."""
    context = click.get_current_context()
    source = context.get_parameter_source
    written = {own.name: own.opts[0] for own in context.command.params}
    return [written[name] for name in names if source(name) is ParameterSource.COMMANDLINE]


def require_torch() -> None:
    """Raise a TorchError, in one line, for a torch that is too old or lacks a private name."""
    import penstock.torch_private  # noqa: F401 - for what it raises


def refuse_inside_torchrun() -> None:
    """Raise a click.UsageError if torchrun has started this process already."""
    if "WORLD_SIZE" in os.environ:
        raise click.UsageError(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']} says that torchrun started this process "
            "already; leave out --num-processes"
        )
