"""The command `penstock`: parse, call, print.  Nothing heavy is imported before a command runs."""

import errno
import io
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import entry_points
from select import select
from typing import Any, TextIO

import click

from penstock import __version__
from penstock.errors import PenstockError
from penstock.launcher import end_with_launcher

from .check import check
from .doctor import doctor
from .options import INTERRUPTED, RECIPES_PACKAGE, USER_ERROR
from .plan import plan
from .profile import profile
from .scale import scale
from .simulate import simulate

_GROUP = "penstock.commands"
"""The group of entry points by which packages add commands."""
_OF_RECIPES = ("compare", "eval", "predict", "recipes", "report", "train")
"""The commands of the recipes package."""


class _Commands(click.Group):
    """The library's commands, and those that installed packages add by entry points."""

    def list_commands(self, context: click.Context) -> list[str]:
        return sorted({*super().list_commands(context), *entry_points(group=_GROUP).names})

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        """Return a command; import one of another package only now."""
        command = super().get_command(context, name)
        if command is not None:
            return command
        for entry in entry_points(group=_GROUP, name=name):
            added: click.Command = entry.load()
            return added
        if name in _OF_RECIPES:
            raise click.UsageError(
                f"`penstock {name}` comes with {RECIPES_PACKAGE}; pip install {RECIPES_PACKAGE}"
            )
        return None


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 99},
)
@click.version_option(__version__, prog_name="penstock")
def penstock() -> None:
    """Train layered models as pipelines, exact to the bit.

    \b
    Example:
      penstock train digits
    """
    end_with_launcher()


for command in (check, doctor, plan, profile, scale, simulate):
    penstock.add_command(command)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 well, 1 "different", 2 the user's mistake, 130 Ctrl-C."""
    with lasting_output():
        code = run(arguments)
    if "penstock.mesh.threads" in sys.modules:  # other commands start without torch
        from penstock.mesh.threads import end_now, must_end_now

        if must_end_now():
            end_now(code)
    sys.exit(code)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; report a mistake in one line on stderr."""
    try:
        code = penstock.main(arguments, prog_name="penstock", standalone_mode=False)
    except click.ClickException as error:
        context = error.ctx if isinstance(error, click.UsageError) else None
        hint = f"; see {context.command_path} --help" if context is not None else ""
        click.echo(f"penstock: {error.format_message().rstrip('.')}{hint}", err=True)
        return USER_ERROR
    except PenstockError as error:
        notes = getattr(error, "__notes__", [])  # the place in the pipeline, if it is known
        place = f" ({'; '.join(notes)})" if notes else ""
        click.echo(f"penstock: {_speaker()}{error}{place}", err=True)
        return USER_ERROR
    except (click.Abort, KeyboardInterrupt):
        click.echo(f"penstock: {_speaker()}interrupted", err=True)
        return INTERRUPTED
    return code if isinstance(code, int) else 0


def _speaker() -> str:
    """Name the rank of this process, if it is one of several."""
    is_one_of_many = os.environ.get("WORLD_SIZE", "1") != "1"
    return f"rank {os.environ.get('RANK', '?')}: " if is_one_of_many else ""


# -- standard output and error --------------------------------------------------------------------

# A closed pipe (`penstock train ... 2>&1 | head`), a closed terminal or a full disk ends the
# output, not the command: lines that cannot be written are dropped.

_STANDARD_ERROR = 2


class _LastingFile(io.FileIO):
    """A file whose writes never fail: after the first failure they go to the null device.

    With `is_told`, a line on standard error reports that.
    """

    def __init__(self, descriptor: int, *, is_told: bool) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._is_told = is_told

    def write(self, data: Any, /) -> int:
        try:
            while (written := super().write(data)) is None:
                select([], [self], [])  # whoever shares it made it non-blocking, and it is full
            return written
        except OSError as error:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())  # for child processes and libraries in C, too
            os.close(null)
            # a closed pipe is no fault: its reader saw enough
            if self._is_told and error.errno != errno.EPIPE and sys.stderr is not None:
                sys.stderr.write(
                    f"penstock: standard output is lost ({error.strerror}): nothing more is "
                    "written to it\n"
                )
                sys.stderr.flush()
            return memoryview(data).nbytes


@contextmanager
def lasting_output() -> Iterator[None]:
    """Let writes to sys.stdout and sys.stderr raise no OSError within the block."""
    before = sys.stdout, sys.stderr
    while (spare := os.open(os.devnull, os.O_RDWR)) <= _STANDARD_ERROR:
        pass  # it was closed at the start: else a file of the run would take its place
    os.close(spare)
    sys.stderr = _lasting(sys.stderr, is_told=False)
    sys.stdout = _lasting(sys.stdout, is_told=True)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:  # Python has none where the descriptor was closed at the start
                stream.flush()
        sys.stdout, sys.stderr = before


def _lasting(stream: TextIO, *, is_told: bool) -> TextIO:
    """Return the stream over a lasting file; one of another kind as it is."""
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    stream.flush()
    file = io.BufferedWriter(_LastingFile(stream.fileno(), is_told=is_told))
    return io.TextIOWrapper(
        file,
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
